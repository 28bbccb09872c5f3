"""BENCHMARKS.md and its results: every figure comes from a file of results, and from a known commit."""

import contextlib
import dataclasses
import json
import pathlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

import document
import pods
import stale
from evidence import pages
from evidence.layouts import UPCYCLED
from evidence.pages import Filled
from evidence.results import RESULTS, Figures, ResultsFile
from evidence.sections import SECTIONS, Section, made_line
from evidence.stamp import Stamp, current_stamp, git
from evidence.tables import tables_of
from tests.support.environment import ROOT

BY_NAME = {section.name: section for section in SECTIONS}
FIRST, SECOND = (
    Stamp(commit=digit * 40, date="2026-11-21", machine="x86_64 with 2 threads", versions={"python": "3.11.7"})
    for digit in "12"
)


@pytest.fixture(scope="module")
def filled() -> Filled:
    return Filled()


def test_documents_are_what_the_results_say(filled: Filled):
    assert document.problems_of(filled) == []
    written = document.documents(filled)
    assert not document.out_of_step(written), "python benchmarks/document.py writes these again"
    assert {document.DOCUMENT, document.GUIDE, RESULTS / "claims.md"} <= set(written)
    assert filled.page(pages.ADVICE).strip() in written[document.GUIDE]


def test_the_overview_is_short_and_leads_to_a_page_for_every_section(filled: Filled):
    overview = filled.page(pages.OVERVIEW)
    assert len(overview.splitlines()) <= 400
    linked = set(re.findall(r"\]\(benchmarks/pages/(\w+)\.md\)", overview))
    assert linked == set(pages.names()) == set(BY_NAME) == {file.stem for file in RESULTS.glob("*.json")}
    for name in pages.names():
        assert f'{{{{ made("{name}") }}}}' in (pages.PAGES / f"{name}.md").read_text("utf-8")
        assert filled.page(name).startswith("# ")


@pytest.mark.parametrize("file", [pages.PAGES / "claims.md", pages.PAGES / "overview.md", document.GUIDE])
def test_a_figure_that_nothing_makes_is_found(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path):
    planted = file.read_text("utf-8") + "\nIt loses 0.0421 nats, 3.2 % of what\n`--keep 0.25` of Qwen1.5 loses.\n"
    assert pages.written_by_hand(planted)[-2:] == ["0.0421", "3.2 %"]
    assert not [one for one in pages.written_by_hand(planted)[:-2] if file != document.GUIDE]


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("+3 nats, -0.5 [-0.7, -0.2]", ["+3", "-0.5", "-0.7", "-0.2"]),
        ("95 % of 12.5%, 4,096 tokens", ["95 %", "12.5%"]),
        ("Qwen2.5-7B, v0.3, GLM-4.5, 0.10.2, `0.5`, [a](b-0.5)", []),
        ('{{ given("0.01") }} and {{ cell("a", "b", "0.9", "c") }}', []),
        ("# Heading 0.5\n```\n0.5\n```\n8 × 512 tokens, 2 cores", []),
    ],
)
def test_which_figures_look_measured(text, figures):
    assert pages.written_by_hand(text) == figures


CHOSEN = {
    "README.md": {"3.11", "3.5", "4.5", "4.7"},
    "docs/families.md": {"1.0", "1.1", "1.5", "3.6", "4.5", "4.6", "4.7", "5.24"},
    "docs/install.md": {"2.13", "3.11", "3.13"},
    "docs/guides/adapters.md": {"4.13"},
    "docs/guides/choose-a-method.md": {"95 %"},
    "docs/guides/compress.md": {"133%"},
    "docs/guides/convert-and-export.md": {"1.0"},
    "docs/guides/encoder-decoders.md": {"95%"},
    "docs/guides/models-that-see.md": {"1 %"},
    "docs/guides/other-beginnings.md": {"0.5", "2.6"},
    "docs/guides/pods-and-gpus.md": {"90 %"},
    "docs/guides/upcycle-and-train.md": {"1.5 %"},
}
"""Versions, names of models, bounds, and sizes that follow from shapes: figures of the guides that are not measured."""


def test_guides_have_no_measured_figures_in_their_prose():
    """What commands print stands in blocks of code. Formulas have constants, which tests of the library hold."""
    found = {}
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = str(file.relative_to(ROOT))
        text = document.without_advice(file.read_text("utf-8"))
        if name == "docs/methods.md" or name.startswith(("docs/results/", "docs/reference/")):
            continue
        figures = {one for one in pages.written_by_hand(text) if not re.fullmatch(r"\d{4}\.\d{5}", one)}  # of arXiv
        if figures - CHOSEN.get(name, set()):
            found[name] = figures - CHOSEN.get(name, set())
    assert not found, "write it without figures, or let results or a test make them"


def test_a_cell_is_found_by_its_row_and_column(filled: Filled):
    asked = '{{ cell("ders_layer", "time", "vanilla", "top-1") }} {{ span("ders_layer", "time", "top-1") }}'
    one, low, _, high = filled.filled(asked).split()
    assert float(low) <= float(one) <= float(high)
    number = 'number("ders_layer", "time", "vanilla", "top-1")'
    assert filled.filled(f"{{{{ {number} | ratio_to({number}) }}}}") == "1.00"
    for wrong in (
        'cell("ders_layer", "time", "vanila", "top-1")',
        'cell("ders_layer", "time", "vanilla", "top-3")',
        'span("ders_layer", "time", "top-1", experts=["none"])',
        'table("ders_layer", "tme")',
        'made("ders")',
        'found("DeRS", "nothing of this")',
        "nothing()",
    ):
        with pytest.raises(pages.PageError):
            filled.filled("{{ " + wrong + " }}")


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
    assert min((stamp for stamp, _ in made), key=lambda stamp: stamp.date).commit[:7] in line


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


def test_a_page_says_the_oldest_commit_of_its_figures(tmp_path: pathlib.Path):
    _results(tmp_path, SECOND).put_rows("time", [])
    section = Section("results", "python benchmarks/x.py DATA", (), lambda folder: Figures("results", folder), dict)
    said = "Command: `python benchmarks/x.py DATA`. Measured at `2222222`, 2026-11-21"
    assert made_line(section, section.opened(tmp_path)) == f"{said}."
    older = dataclasses.replace(FIRST, date="2026-11-20")
    _results(tmp_path, older).put_rows("memory", [])
    said = said.replace("2222222`, 2026-11-21", "1111111`, 2026-11-20")
    some = "the oldest of 2 stamps in `benchmarks/results/results.json`"
    assert made_line(section, section.opened(tmp_path)) == f"{said}, {some}."


def test_a_page_says_how_many_commits_its_code_has_had(checkout: pathlib.Path, tmp_path: pathlib.Path):
    results = _results(tmp_path, current_stamp(checkout))
    results.put_rows("time", [])
    section = Section("results", "python x.py", ("code.py",), lambda folder: Figures("results", folder), dict)
    assert "since" not in made_line(section, results, checkout)
    for name in ("other.py", "code.py"):
        (checkout / name).write_text("2\n")
        _commit(checkout)
    assert made_line(section, results, checkout).endswith("; 1 commits since in the code that it measures.")


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
