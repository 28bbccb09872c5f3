"""BENCHMARKS.md and its results: every table comes from a file of results, and every figure from a known commit."""

import contextlib
import json
import pathlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

import document
import pods
import stale
from evidence.layouts import UPCYCLED
from evidence.results import RESULTS, Figures, ResultsFile
from evidence.sections import SECTIONS, Section, made_line
from evidence.stamp import Stamp, current_stamp, git
from evidence.tables import tables_of
from tests.support.environment import ROOT

DOCUMENT = (ROOT / "BENCHMARKS.md").read_text()
BY_NAME = {section.name: section for section in SECTIONS}
FIRST, SECOND = (
    Stamp(commit=digit * 40, date="2026-11-21", machine="x86_64 with 2 threads", versions={"python": "3.11.7"})
    for digit in "12"
)


@pytest.fixture(scope="module")
def blocks() -> dict[str, str]:
    return document.blocks()


def test_the_document_and_the_reports_are_what_the_results_say(blocks):
    after, problems = document.rewritten(DOCUMENT, blocks)
    assert not problems
    assert after == DOCUMENT, "BENCHMARKS.md is out of step with its results: python benchmarks/document.py"
    for file, text in document.reports().items():
        assert file.read_text() == text, f"{file.name} is out of step with its results: python benchmarks/document.py"


def test_what_does_not_come_from_the_results_is_found(blocks):
    line = next(line for line in DOCUMENT.splitlines() if line.startswith("| LM r=16 |"))
    changed = DOCUMENT.replace(line, line.replace("2.", "3.", 1))
    assert changed != DOCUMENT and document.rewritten(changed, blocks)[0] == DOCUMENT
    made = next(line for line in DOCUMENT.splitlines() if line.startswith("Command: `python benchmarks/convert"))
    assert document.rewritten(DOCUMENT.replace(made, ""), blocks)[0] == DOCUMENT
    _, problems = document.rewritten(DOCUMENT + "\n| a | b |\n|---|---|\n| 1 | 2 |\n", blocks)
    assert problems == ["a table that no results make: |---|---|"]
    block = "<!-- convert: commands -->"
    _, problems = document.rewritten(DOCUMENT.replace(block, "<!-- convert: other -->"), blocks)
    assert problems == [
        "there is no block 'convert: other' in the results",
        "the block 'convert: commands' does not stand in the document",
    ]


def test_every_section_says_how_its_figures_are_made():
    parts = re.split(r"(?m)^## ", DOCUMENT)[1:]
    found = [re.findall(r"<!-- (\w+): made -->", part) for part in parts]
    assert all(len(names) == 1 for names in found), found
    assert sorted(name for names in found for name in names) == sorted(BY_NAME)
    assert {file.stem for file in RESULTS.glob("*.json")} == set(BY_NAME)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_figure_has_a_commit_and_a_program(section: Section):
    assert all((ROOT / source).exists() for source in section.sources), section.sources
    assert (ROOT / section.program).is_file()
    results = section.opened(RESULTS)
    made, line = results.made(), made_line(section, results)
    assert made and all(paths for _, paths in made)
    for stamp, _ in made:
        assert re.fullmatch(r"[0-9a-f]{40}", stamp.commit or "")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", stamp.date) and stamp.machine and "jax" in stamp.versions
        assert not stamp.uncommitted, "figures of code that was never committed cannot be made again"
        assert stamp.commit[:7] in line


def test_commits_of_figures_are_in_the_history():
    if git("rev-parse", "HEAD") is None or (git("rev-parse", "--is-shallow-repository") or "").strip() != "false":
        pytest.skip("needs the whole history; this is no clone, or a shallow one")
    commits = {stamp.commit for section in SECTIONS for stamp, _ in section.opened(RESULTS).made()}
    for commit in commits:
        assert git("merge-base", "--is-ancestor", commit, "HEAD") is not None, f"{commit} is not in the history"


def test_recipes_quote_what_the_compiler_said():
    figures = Figures("pods")
    for recipe in {step.recipe for step in pods.STEPS}:
        head = pods.head_of((pods.RECIPES / f"{recipe}.toml").read_text())
        assert head == pods.header(recipe, figures), f"{recipe}.toml is out of step with the results"


def test_another_bank_takes_the_place_of_every_one():
    config = {"layers": [{"moe": {"bank": {"kind": "low-rank"}}}, {"ffn": {}}], "bank": None}
    pods.replace_banks(config, {"kind": "sparse"})
    assert config == {"layers": [{"moe": {"bank": {"kind": "sparse"}}}, {"ffn": {}}], "bank": {"kind": "sparse"}}


def test_one_expert_takes_the_place_of_an_moe():
    config = {"segments": [{"pattern": [{"attention": {}, "moe": {"expert": {"dim": 3}}}, {"ffn": {"dim": 4}}]}]}
    pods.replace_moes(config)
    assert config == {"segments": [{"pattern": [{"attention": {}, "ffn": {"dim": 3}}, {"ffn": {"dim": 4}}]}]}


def _results(folder: pathlib.Path, stamp: Stamp) -> ResultsFile:
    """Opened as by a program that runs at a commit."""
    results = Figures("results", folder, writes=True)
    results._stamp = lambda: stamp
    return results


def _made(folder: pathlib.Path) -> dict[str, list[tuple[str, ...]]]:
    return {stamp.commit[0]: paths for stamp, paths in Figures("results", folder).made()}


def test_every_figure_keeps_the_commit_that_it_was_made_at(tmp_path: pathlib.Path):
    results = _results(tmp_path, FIRST)
    for name in "ab":
        for seed in "01":
            results.put("runs", name, seed, value={"loss": 1.0})
    assert _made(tmp_path) == {"1": [("runs", name, seed) for name in "ab" for seed in "01"]}
    # Some are measured again, with other code.
    again = _results(tmp_path, SECOND)
    again.put("runs", "b", "1", value={"loss": 2.0})
    assert _made(tmp_path)["2"] == [("runs", "b", "1")] and len(_made(tmp_path)["1"]) == 3
    again.forget("runs", "b")
    again.put("runs", "b", "0", value={"loss": 2.0})
    assert _made(tmp_path) == {"1": [("runs", "a", "0"), ("runs", "a", "1")], "2": [("runs", "b", "0")]}
    # And back, which needs no third stamp.
    _results(tmp_path, FIRST).put("runs", "b", value={"0": {"loss": 1.0}, "1": {"loss": 1.0}})
    assert set(_made(tmp_path)) == {"1"}
    # Once none is left of the first, only the second is named.
    _results(tmp_path, SECOND).put("runs", value={"a": {"loss": 3.0}})
    assert _made(tmp_path) == {"2": [("runs", "a")]}
    assert len(json.loads((tmp_path / "results.json").read_text())["made"]) == 2


def test_threads_may_store_figures_at_the_same_time(tmp_path: pathlib.Path):
    results = _results(tmp_path, FIRST)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: results.put("runs", "a", str(name), value={"loss": 1.0}), range(200)))
    assert len(_made(tmp_path)["1"]) == 200


def test_a_section_names_what_was_made_at_another_commit(tmp_path: pathlib.Path):
    _results(tmp_path, FIRST).put_rows("time", [])
    section = Section("results", "python benchmarks/x.py DATA", (), lambda folder: Figures("results", folder), dict)
    said = "Command: `python benchmarks/x.py DATA`. Measured at `1111111`, 2026-11-21, x86_64 with 2 threads, Python 3"
    assert made_line(section, section.opened(tmp_path)) == f"{said}.11.7."
    _results(tmp_path, SECOND).put_rows("memory", [])
    assert made_line(section, section.opened(tmp_path)) == f"{said}.11.7; memory: `2222222`, 2026-11-21."


def test_rows_can_be_measured_one_by_one(tmp_path: pathlib.Path):
    for name, loss in (("dense", 2.5), ("vanilla", 2.25)):
        _results(tmp_path, FIRST).put_row(UPCYCLED.name, name, [name, 0, loss])
    again = _results(tmp_path, SECOND)
    again.put_row(UPCYCLED.name, "dense", ["dense", 0, 2.0])
    assert again.rows(UPCYCLED.name) == [["dense", 0, 2.0], ["vanilla", 0, 2.25]]
    assert _made(tmp_path) == {"1": [("rows", UPCYCLED.name, "vanilla")], "2": [("rows", UPCYCLED.name, "dense")]}


def test_tables_are_written_by_their_layout_and_read_by_their_heading(tmp_path: pathlib.Path):
    figures = _results(tmp_path, FIRST)
    figures.put_rows(UPCYCLED.name, [["dense", 0, 2.88091], ["vanilla", 496640, None]])
    rows = "| dense | 0 | 2.8809 |\n| vanilla | 496,640 |  |"
    table = f"| model | parameters added | held-out loss |\n|---|---|---|\n{rows}"
    assert UPCYCLED.text(figures) == table
    other = table.replace("dense", "sparse")
    assert tables_of(f"# A\n\n{table}\n\n## B\ntext\n\n{other}\n\n{table}\n# C") == {"A": table, "B": other}


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A repository with a file of code, one of results and a document."""
    if git("--version", root=tmp_path) is None:
        pytest.skip("needs git")
    root = tmp_path / "checkout"
    (root / "benchmarks" / "results").mkdir(parents=True)
    for name in ("code.py", "other.py", "benchmarks/results/x.json", "BENCHMARKS.md"):
        (root / name).write_text("1\n")
    _git(root, "init", "-q")
    _commit(root)
    return root


def _git(root: pathlib.Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)


def _commit(root: pathlib.Path) -> None:
    _git(root, "add", "-A")
    _git(root, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "-m", "change")


def test_a_stamp_says_what_is_not_committed(checkout: pathlib.Path, tmp_path: pathlib.Path):
    stamp = current_stamp(checkout)
    assert re.fullmatch(r"[0-9a-f]{40}", stamp.commit) and stamp.uncommitted == () and "jax" in stamp.versions
    for name in ("benchmarks/results/x.json", "BENCHMARKS.md"):
        (checkout / name).write_text("2\n")
    assert current_stamp(checkout) == stamp
    (checkout / "code.py").write_text("2\n")
    (checkout / "new.py").write_text("2\n")
    dirty = current_stamp(checkout)
    assert sorted(dirty.uncommitted) == ["code.py", "new.py"]
    assert "with uncommitted changes to " in dirty.line
    assert current_stamp(tmp_path).commit is None


@pytest.mark.parametrize(("limit", "exits"), [(None, False), (1, False), (0, True)])
def test_too_many_stale_figures_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys, limit, exits):
    monkeypatch.setattr(stale, "state", lambda *_: ["a: up to date", "b: 2 files of its code have changed since"])
    monkeypatch.setattr("sys.argv", ["stale.py", "demo", *([] if limit is None else ["--limit", str(limit)])])
    with pytest.raises(SystemExit) if exits else contextlib.nullcontext():
        stale.main()
    assert capsys.readouterr().out.endswith("1 of 2 stamps are not of the code that is there now\n")


def test_stale_figures_are_listed(checkout: pathlib.Path, tmp_path: pathlib.Path):
    results = _results(tmp_path, current_stamp(checkout))
    results.put_rows("table", [])
    said = results.made()[0][0].short_line
    assert stale.state(results, ("code.py",), checkout) == [f"{said}, 1 figures: up to date"]
    (checkout / "other.py").write_text("2\n")
    _commit(checkout)
    assert stale.state(results, ("code.py",), checkout) == [f"{said}, 1 figures: up to date"]
    (checkout / "code.py").write_text("2\n")
    found = [f"{said}, 1 figures: 1 files of its code have changed since"]
    assert stale.state(results, ("code.py",), checkout) == found
    _commit(checkout)
    assert stale.state(results, ("code.py",), checkout) == found
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{checkout}", str(shallow)], check=True)
    unknown = f"{said}, 1 figures: not known, this clone has no such commit"
    assert stale.state(results, ("code.py",), shallow) == [unknown]
