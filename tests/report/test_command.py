"""`moe-jax report PATH...`, as a user runs it."""

import base64
import dataclasses
import json
import shutil
import xml.etree.ElementTree
from pathlib import Path

import pytest

from moe_jax.commands import cli
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.report.build import _figures, side_by_side_table
from moe_jax.report.subjects import named, open_subject, with_evaluations
from tests.report.subjects_on_disk import EVIL, STEPS, write_run, write_subjects
from tests.report.test_elements import Reader, read
from tests.support.browser import Browser
from tests.support.tiers import long

_PICTURE, _PHOTOGRAPH = "data:image/svg+xml;base64,", "data:image/png;base64,"
# Of the model: two of similarity. Of the run: loss, rate, gradient, speed (losses of routers have the coefficient 0);
# use over time and at the end.
# Of the compressed one: two. The sweep has one, the measurements have four, and one that was drawn before.
PICTURES = 2 + 6 + 2 + 1 + 5


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_subjects(tmp_path_factory.mktemp("subjects"))


@pytest.fixture(scope="module")
def page(subjects, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of all of them."""
    out = tmp_path_factory.mktemp("page") / "page.html"
    assert cli.main(["report", *map(str, subjects.values()), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def reader(page: Path) -> Reader:
    return read(page.read_text())


@long
def test_everything_is_shown_and_nothing_is_loaded(reader: Reader):
    names = [name for name, _ in reader.elements]
    assert "script" not in names and "link" not in names and "iframe" not in names
    images = [attributes for name, attributes in reader.elements if name == "img"]
    sources = [attributes["srcset"] for name, attributes in reader.elements if name == "source"]
    assert len(images) == len(sources) == PICTURES and all(image["alt"] for image in images)
    addresses = [*(image["src"] for image in images), *sources]
    assert sum(address.startswith(_PHOTOGRAPH) for address in addresses) == 2
    for address in addresses:
        if address.startswith(_PHOTOGRAPH):
            assert base64.b64decode(address.removeprefix(_PHOTOGRAPH), validate=True).startswith(b"\x89PNG")
            continue
        assert address.startswith(_PICTURE)
        picture = base64.b64decode(address.removeprefix(_PICTURE), validate=True)
        assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg")
        assert b"<metadata>" not in picture
    assert names.count("table") == names.count("caption") > 15
    assert EVIL in reader.text


@pytest.mark.parametrize(
    "shown",
    [
        "Side by side",
        "upcycle", "12.3 kB",  # lineage
        "held-out loss, least3.0000", "tokens1,920", "loss, last0.1333", "checkpoints30",  # run
        "experts4.0 kB1.0 kB25.0%", "the whole model10.0 kB7.0 kB70.0%",  # compression
        "the experts are used is not known", "resmoekeep 0.251.0 kB25.0%0.750032.0000",
        "LoRA", "stands on", "adapter directory",
        "held-out.txtperplexity4.4817117", "a.jsonlaccuracy0.75000.5000 to 0.90004", "piqaacc0.7000± 0.0100200",
        "low-rank, rank 2 (layer 0)",
        "Experts of 1,234 tokens of pictures, and 567 of texts", "Picture 1, and by layer the first expert",
    ],
)  # fmt: skip
def test_figures_are_the_ones_in_the_files(reader: Reader, shown: str):
    assert shown in reader.text


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 1200), (False, 360)])
def test_in_a_browser(browser: Browser, page: Path, reader: Reader, dark: bool, width: int):
    found = browser.examine(page, dark=dark, width=width)
    names = [name for name, _ in reader.elements]
    assert found.problems == []
    assert (found.images, found.tables) == (PICTURES, names.count("table"))
    assert found.headings[1] == "Side by side" and "run" in found.headings


def test_without_weights_none_are_read(subjects, tmp_path: Path, monkeypatch):
    def read_leaf(self, path):
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(ModelDirectory, "read", read_leaf)
    out = tmp_path / "page.html"
    assert cli.main(["report", str(subjects["model"]), "--no-weights", "--out", str(out)]) == 0
    text = read(out.read_text()).text
    assert "Similarity" not in text and "Side by side" not in text and "How it was made" in text


def test_evaluations_are_shown_with_their_model_and_names_tell_apart(subjects, tmp_path: Path):
    kinds = ("model", "run", "text", "labels", "tasks")
    found = named(with_evaluations([open_subject(subjects[kind]) for kind in kinds]))
    assert [subject.name for subject in found] == ["model", "run", "labels.json"]
    assert [score.task for one in found[0].evaluations for score in one.scores] == ["held-out.txt"] * 2 + ["piqa"] * 2
    other = shutil.copytree(subjects["run"], tmp_path / "other" / "run")
    names = [subject.name for subject in named([open_subject(subjects["run"]), open_subject(other)])]
    assert names == [f"{subjects['run'].parent.name}/run", "other/run"]


def test_an_evaluation_of_the_model_of_a_run_is_the_runs(subjects, tmp_path: Path):
    evaluation = tmp_path / "text.json"
    evaluation.write_text(
        json.dumps({"perplexity": 2.0, "nll": 0.7, "model": str(subjects["run"] / "model"), "text": "t", "tokens": 1})
    )
    (found,) = with_evaluations([open_subject(subjects["run"]), open_subject(evaluation)])
    assert found.run is not None and found.evaluations[0].scores[0].value == 2.0


def test_evaluations_on_files_of_one_name_are_told_apart_and_none_is_lost(subjects, tmp_path: Path):
    for number, (text, model) in enumerate([("wiki/a.txt", "m"), ("code/a.txt", "m"), ("code/a.txt", "\0")]):
        score = {"perplexity": 2.0 + number, "nll": 0.7, "model": str(subjects["model"]) if model == "m" else model}
        (tmp_path / f"{number}.json").write_text(json.dumps({**score, "text": text, "tokens": 1}))
    given = [subjects["model"], *(tmp_path / f"{number}.json" for number in range(3))]
    found, other = named(with_evaluations([open_subject(path) for path in given]))
    assert [one.scores[0].task for one in found.evaluations] == ["wiki/a.txt", "code/a.txt"]
    assert other.name == "2.json"
    again = dataclasses.replace(found, evaluations=found.evaluations * 2)
    titles = [title for title in _figures(again, None) if "perplexity" in title]
    assert len(titles) == 4


def test_runs_are_compared_by_their_losses(subjects, tmp_path: Path):
    other = write_run(tmp_path / "slower", subjects["model"], losses=8.0)
    (other / "metrics.jsonl").open("a").write('{"step": 31, "lo')  # killed
    both = named([open_subject(subjects["run"]), open_subject(other)])
    table, losses = side_by_side_table(both, [None, None])
    ((_, picture),) = [one for one in read(str(losses)).elements if one[0] == "img"]
    assert f"slower from 8 at step 1 to 0.2667 at step {STEPS}" in str(picture["alt"])
    assert "run from 4 at step 1" in str(picture["alt"]) and "training loss, last0.13330.2667" in read(str(table)).text


def test_a_run_that_has_just_begun(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text('run_dir = "run"')
    (run / "run.json").write_text("{}")
    out = tmp_path / "page.html"
    assert cli.main(["report", str(run), "--out", str(out)]) == 0
    assert "the recipe with every key" in out.read_text() and "<img" not in out.read_text()


def test_a_name_is_no_formula(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"model": "a$b^$c", "layers": [{"layer": 0, "load": [0.5, 0.5]}]}')
    assert cli.main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "page.html")]) == 0


def test_a_path_given_twice_is_shown_once(subjects, tmp_path: Path):
    words = ["report", subjects["text"], subjects["text"], "--out", tmp_path / "page.html"]
    assert cli.main([str(word) for word in words]) == 0
    assert (tmp_path / "page.html").read_text().count("<caption>Figures of every") == 1


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.json", None, "nothing at absent.json"),
        ("absent", None, "model at absent"),
        ("a.txt", "text", "a.txt is nothing"),
        ("a.json", "{", "a.json is not valid JSON"),
        ("a.json", '{"x": 1}', "a.json is nothing"),
        (
            "a.json",
            '{"perplexity": "low", "text": "t", "model": "m"}',
            "a.json: perplexity is 'low', expected a number",
        ),
        ("a.json", '{"accuracy": 0.5, "file": "f", "model": "m"}', "a.json: interval is None"),
        ("a.json", '{"results": [1]}', "a.json: results is [1], expected an object"),
        ("a.json", '{"command": "compress --sweep", "measured": {"nll": 1}}', "a.json: 4 problems"),
        ("a.json", '{"command": "compress --sweep"}', "a.json: measured is None"),
        (
            "a.json",
            '{"model": "m", "layers": [{"layer": 0, "cosine_to_base": 1}]}',
            "not what `inspect --plots` writes",
        ),
        ("a.json", '{"model": "m", "layers": []}', "a.json holds no layer"),
        ("a.json", '{"model": "m", "layers": [], "use": {"layers": [{"layer": 0}]}}', "use is {'layers'"),
        ("a.json", '{"model": "m", "layers": [{"layer": Infinity, "load": [1]}]}', "entry 0 of layers"),
        ("run/metrics.jsonl", '{"loss": 1}\n', "run/metrics.jsonl: expected an object"),
        ("run/recipe.toml", b"\xff", "run/recipe.toml is not TOML"),
        ("empty/a.bin", "", "report can show"),
    ],
)
def test_what_cannot_be_shown_is_said_and_nothing_is_written(name, content, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    if path.parent.name == "run":
        Path("run").mkdir()
        Path("run/recipe.toml").write_text('run_dir = "run"')
        Path("run/run.json").write_text("{}")
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(Path().rglob("*"))
    assert cli.main(["report", str(path.parent if len(path.parts) > 1 else path)]) == 2
    caught = capsys.readouterr()
    assert expected in caught.err and not caught.out and sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "missing: PATH"),
        (["{text}", "--out", "there.html"], "there.html already exists"),
        (["{text}", "--out", "nowhere/page.html"], "no directory nowhere"),
        (["{model}", "--out", "{model}/page.html"], "lies inside"),
        (["{model}", "--no-weight"], "did you mean '--no-weights'?"),
        (["{compressed}"], "compress, layers: unknown key 'x'"),
        (["{nonfinite}"], "entries that are"),
    ],
)
def test_bad_options_and_models_leave_nothing(words, expected, subjects, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there.html").write_text("mine")
    places = {kind: str(path) for kind, path in subjects.items()}
    if "{compressed}" in words:
        spoilt = shutil.copytree(subjects["compressed"], tmp_path / "compressed")
        entries = json.loads((spoilt / "lineage.json").read_text())
        entries[0]["measured"]["layers"][0]["x"] = 1
        (spoilt / "lineage.json").write_text(json.dumps(entries))
        places["compressed"] = str(spoilt)
    if "{nonfinite}" in words:
        places["nonfinite"] = places["model"]
        read_leaf = ModelDirectory.read
        monkeypatch.setattr(ModelDirectory, "read", lambda self, path: read_leaf(self, path) * float("nan"))
    before = sorted(Path().rglob("*"))
    assert cli.main(["report", *(word.format(**places) for word in words)]) == 2
    caught = capsys.readouterr()
    assert expected in caught.err and caught.err.count("\n") == 1 and not caught.out
    assert sorted(Path().rglob("*")) == before and Path("there.html").read_text() == "mine"
