"""The programs in examples/ and convert/, and those of README.md and of the guide to Python."""

import importlib.util
import pathlib
import re
import runpy
import sys

import numpy as np
import pytest

import moe_jax
from tests.support.environment import ROOT
from tests.support.tiers import long, one_in

EXAMPLES, CONVERT = ROOT / "examples", ROOT / "convert"


# `last_words` by tests/harness, `train_loop` by tests/training, and parts of one's own by tests/nn.
EXAMPLES_TESTED = {"moe_layer", "upcycle", "compress_layer", "barycenter", "look_inside", "last_words", "train_loop"}
EXAMPLES_TESTED |= {"own_eye", "own_router", "own_gate", "own_form", "own_activation", "own_layer"}


def main_of(name: str, folder: pathlib.Path = EXAMPLES):
    """Returns the `main` of a program."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_every_example_is_tested_and_says_how_to_run_it():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == EXAMPLES_TESTED
    for file in EXAMPLES.glob("*.py"):
        assert f"python examples/{file.name}" in file.read_text()


def test_an_moe_layer_learns_inside_another_model(capsys):
    first, last = main_of("moe_layer")(steps=60)
    assert last < 0.1 * first
    assert "balance loss" in capsys.readouterr().out


@long
def test_upcycling_in_memory_and_training_lower_the_perplexity(capsys):
    before, after = main_of("upcycle")()
    assert before > 60 and after < 10
    assert "exported config.json, lineage.json, model.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("name", [None, pytest.param("stories260K", marks=long), pytest.param("smollm", marks=long)])
@long
def test_a_look_inside_finds_what_a_researcher_asks_for(name, request, capsys):
    layers = {None: 2, "stories260K": 5, "smollm": 30}[name]
    if name == "stories260K":
        path = str(request.getfixturevalue("data_dir") / "weights" / name / "hf")
    else:
        path = name and str(request.getfixturevalue(name))
    found = main_of("look_inside")(path)
    assert found["layers with routers"] == layers and found["choices of the expert"] > 0
    assert found["logits moved by"] > 1e-3 and found["loss after"] < found["loss before"]
    assert found["leaves that differ"] == found["choices when it is off"] == 0
    assert "parameters of the layer's experts: " in capsys.readouterr().out


def test_resmoe_finds_the_orders_of_the_neurons(capsys):
    errors = main_of("compress_layer")()
    assert errors["resmoe"] < 0.2 * errors["up"]
    sizes = re.findall(r"-> ([\d,]+) bytes", capsys.readouterr().out)
    assert len(sizes) == 2 and sizes[0] == sizes[1]


def test_the_barycenter_is_nearer_than_the_noise(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["barycenter.py"])
    plain, barycenter = main_of("barycenter")()
    assert barycenter <= 3 * 0.05**2 < 0.01 * plain
    runpy.run_path(str(EXAMPLES / "barycenter.py"), run_name="__main__")
    assert "converged: True" in capsys.readouterr().out


def test_checkpoints_are_converted_there_and_back(tmp_path, capsys):
    checkpoint = moe_jax.export(moe_jax.tiny_model(), tmp_path / "tiny")
    for _ in range(2):
        (model,) = main_of("hf_to_orbax", CONVERT)(str(checkpoint), str(tmp_path / "models"))
    assert f"{model} is there" in capsys.readouterr().out
    back = main_of("orbax_to_hf", CONVERT)
    assert back(str(model), str(tmp_path / "back"), str(checkpoint)) > 10
    named = [str(tmp_path / folder / "Qwen2.5-7B") for folder in ("one", "two")]
    with pytest.raises(moe_jax.InputError, match="checkpoints are called Qwen2.5-7B"):
        main_of("hf_to_orbax", CONVERT)(*named, str(tmp_path / "models"))
    other = moe_jax.export(moe_jax.tiny_model(seed=1), tmp_path / "other")
    with pytest.raises(moe_jax.InputError, match="differ from"):
        back(str(model), str(tmp_path / "again"), str(other))
    upcycled = main_of("upcycled_to_hf", CONVERT)(str(model), str(tmp_path / "moe"))
    assert moe_jax.convert(upcycled).config.family == "mixtral"


@long
def test_a_model_of_ones_own_eye_looks(capsys):
    before, after, without = main_of("own_eye")()
    assert after > 0.9 > 0.5 > max(before, without)
    assert "with each other's pictures" in capsys.readouterr().out


@one_in(2)
@pytest.mark.parametrize("page", ["README.md", "docs/guides/from-python.md"])
def test_the_program_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moe_jax.save(moe_jax.tiny_model(), "llama-dir")
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    # Its numbers are those of a model of billions; this one has 16 neurons a layer and 2 layers.
    program = program.replace("low-rank:16", "low-rank:2").replace('"steps": 100', '"steps": 3')
    random = np.random.default_rng(0)
    names = {"batches": [random.integers(0, 64, (2, 17))] * 3, "ids": random.integers(0, 64, 40)}
    exec(compile(program, page, "exec"), names)
    assert (tmp_path / "hf-dir" / "model.safetensors").is_file()
    assert names["inside"].routing.keys() == {1}


def test_the_table_of_the_guide_names_what_is_public():
    section = (ROOT / "docs" / "guides" / "from-python.md").read_text(encoding="utf-8")
    verbs = re.findall(r"`(\w+)`", section.partition("| `Model`")[0].partition("|---|---|")[2])
    assert len(verbs) == 14 and set(verbs) <= set(dir(moe_jax))
