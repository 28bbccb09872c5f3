"""`moe-jax inspect MODEL --plots DIR`."""

import json
import pathlib

import matplotlib.image
import numpy as np
import pytest

from moe_jax.commands import cli
from moe_jax.figures import measure_similarity
from tests.support.figure_models import BANKS, EXPERTS, moe_config, write_model
from tests.support.tiers import long

COSINES = {"cosine_to_base.png", "cosine_between_experts.png", "figures.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("plots") / "model", moe_config(None, *BANKS.values()))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("It is the east, and Juliet is the sun. " * 3)
    return file


def test_without_a_text_cosines_are_drawn_and_the_way_to_the_load_is_said(model, tmp_path: pathlib.Path, capsys):
    assert cli.main(["inspect", str(model.path), "--plots", str(tmp_path / "plots")]) == 0
    out = capsys.readouterr().out
    assert f"wrote {tmp_path / 'plots' / 'figures.json'}" in out and "give --text FILE" in out
    assert {file.name for file in (tmp_path / "plots").iterdir()} == COSINES
    for name in COSINES - {"figures.json"}:
        picture = matplotlib.image.imread(tmp_path / "plots" / name)
        assert min(picture.shape[:2]) > 300 and picture[..., :3].std() > 0.02
    numbers = json.loads((tmp_path / "plots" / "figures.json").read_text())
    assert numbers["text"] is None and [layer["layer"] for layer in numbers["layers"]] == [1, 2, 3, 4]
    for layer in numbers["layers"]:
        measured = measure_similarity(model, layer["layer"])
        assert layer["base"] == measured.base and layer["load"] is None
        every = np.concatenate(list(measured.to_base.values()))
        to_base = layer["cosine_to_base"]
        assert [to_base["least"], to_base["greatest"]] == [every.min(), every.max()]
        assert to_base["mean"] == pytest.approx(every.mean())
        assert to_base["down"] == measured.to_base["down"].tolist()
        assert layer["cosine_between_experts"] == measured.between.tolist()


@long
def test_with_a_text_the_load_is_drawn_too(text, tmp_path: pathlib.Path, capsys):
    model = write_model(tmp_path / "model", moe_config(None, BANKS["low-rank"], BANKS["full"]))
    words = ["inspect", model.path, "--plots", tmp_path / "plots", "--text", text, "--seq-len", 16, "--json"]
    assert cli.main([str(word) for word in words]) == 0
    described = json.loads(capsys.readouterr().out)
    files = {pathlib.Path(file).name for file in described["plots"]}
    assert files == COSINES | {"expert_load.png"} == {file.name for file in (tmp_path / "plots").iterdir()}
    numbers = json.loads((tmp_path / "plots" / "figures.json").read_text())
    assert numbers["text"] == {"path": str(text), "tokens": 117, "seq_len": 16}
    for layer in numbers["layers"]:
        assert len(layer["load"]) == EXPERTS and sum(layer["load"]) == pytest.approx(1.0)


def test_a_folder_that_exists_is_left_alone(model, tmp_path: pathlib.Path, capsys):
    (tmp_path / "figures.json").write_text("mine")
    assert cli.main(["inspect", str(model.path), "--plots", str(tmp_path)]) == 2
    caught = capsys.readouterr()
    assert f"{tmp_path} already exists" in caught.err and not caught.out
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]


def test_a_dense_model_has_nothing_to_draw(tmp_path: pathlib.Path, capsys):
    dense = write_model(tmp_path / "dense", moe_config(None))
    assert cli.main(["inspect", str(dense.path), "--plots", str(tmp_path / "plots")]) == 2
    caught = capsys.readouterr()
    assert "dense: --plots draws experts" in caught.err and caught.err.count("\n") == 1
    assert not caught.out and not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--text", "a.txt"], "--text belongs to --plots DIR"),
        (["--seq-len", "8"], "--seq-len belongs to --plots DIR"),
        (["--plots", "plots", "--seq-len", "8"], "--seq-len belongs to --text FILE"),
        (["--plots", "plots", "--split"], "--split belongs to --text FILE"),
        (["--plots", "plots", "--text", "absent.txt"], "no text at absent.txt"),
        (["--plots", "plots", "--text", "pictures.txt", "--samples", "3"], "--samples is for rows of data"),
        (["--plots", "plots", "--text", "absent.txt", "--seq-len", "1"], "seq_len = 1 must be at least 2"),
    ],
)
def test_bad_options_leave_nothing(words, expected, model, tmp_path: pathlib.Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", str(model.path), *words]) == 2
    caught = capsys.readouterr()
    assert expected in caught.err and caught.err.count("\n") == 1 and not caught.out
    assert not list(tmp_path.iterdir())
