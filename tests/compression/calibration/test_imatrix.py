"""Experts compressed by an imatrix of llama.cpp in place of a text."""

from pathlib import Path

import numpy as np
import pytest

import moe_jax
from moe_jax.api.model import open_model
from moe_jax.commands.cli import main
from moe_jax.compression.calibration.recording import read_layer
from moe_jax.compression.spec import SweepSpec
from moe_jax.conversion.gguf.expert_importance import read_expert_importance
from moe_jax.conversion.gguf.imatrix import write_imatrix
from moe_jax.core.errors import InputError
from tests.support.tiers import long

EXPERTS = 4
QUANTIZE = {"method": "quantize", "bits": 2, "group_size": 16}


@pytest.fixture(scope="module")
def moe():
    return moe_jax.tiny_model(experts=EXPERTS)


@pytest.fixture
def text_of_words(models, text):
    """A model with a tokenizer, and a text."""
    return models["one"], text


def imatrix_of(model, file: Path, experts: int = EXPERTS, width: int | None = None, layers: int | None = None) -> Path:
    """A file with inputs of very unlike sizes; by default as many and as wide as the model's."""
    draw = np.random.default_rng(0)
    widths = {"gate": width or model.config.d_model, "up": width or model.config.d_model, "down": 32}
    squares = {
        f"blk.{i}.ffn_{matrix}_exps.weight": np.exp(3 * draw.standard_normal((experts, size))).astype(np.float32)
        for i in model.config.moe_layers[:layers]
        for matrix, size in widths.items()
    }
    squares |= {name.replace("gate", "up"): sums for name, sums in squares.items() if "gate" in name}  # one input
    counts = {name: np.ones(experts, np.float32) for name in squares}
    write_imatrix(file, squares, counts, datasets=["text"], chunk_count=1, chunk_size=8)
    return file


def error_of(model, small, importance) -> float:
    """The weighted squared errors of all experts, over their weighted squares."""
    error = whole = 0.0
    for layer, own in importance.items():
        for matrix in ("gate", "up", "down"):
            path = f"layers/{layer}/mlp/experts/{matrix}/kernel"
            kernel, made = (np.asarray(one.read(path), np.float64) for one in (model, small))
            weights = own["hidden" if matrix == "down" else "inputs"][:, :, None].astype(np.float64)
            error += float((weights * (made - kernel) ** 2).sum())
            whole += float((weights * kernel**2).sum())
    return error / whole


def test_inputs_that_are_large_are_kept(moe, tmp_path):
    file = imatrix_of(moe, tmp_path / "imatrix.gguf")
    importance = read_expert_importance(file, moe.source, moe.config.moe_layers)
    errors = []
    for given in ({}, {"imatrix": file}):
        small = moe_jax.compress(moe, method="up", keep=0.25, **given)
        assert small.lineage[-1]["options"].get("imatrix") == (str(file) if given else None)
        moe_jax.export(small, tmp_path / f"whole{len(errors)}")
        errors.append(error_of(moe.source, moe_jax.load(tmp_path / f"whole{len(errors)}").source, importance))
    assert errors[1] < 0.5 * errors[0]


def test_codes_follow_the_inputs(moe, tmp_path):
    file = imatrix_of(moe, tmp_path / "imatrix.gguf")
    importance = read_expert_importance(file, moe.source, moe.config.moe_layers)
    errors = []
    for given in ({}, {"imatrix": file}):
        small = moe_jax.compress(moe, method="quantize", bits=2, group_size=16, **given)
        moe_jax.export(small, tmp_path / f"whole{len(errors)}")
        errors.append(error_of(moe.source, moe_jax.load(tmp_path / f"whole{len(errors)}").source, importance))
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"experts": 3}, "made with another"),
        ({"width": 8}, "made with another"),
        ({"layers": 1}, "says nothing of"),
    ],
)
def test_a_file_of_another_model_is_refused(moe, tmp_path, made, said):
    file = imatrix_of(moe, tmp_path / "imatrix.gguf", **made)
    with pytest.raises(InputError, match=said):
        moe_jax.compress(moe, tmp_path / "small", method="quantize", bits=2, imatrix=file)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "reap", "keep": 0.5}, "what the experts do"),
        ({"method": "up", "keep": 0.5, "calibrate": "text.txt"}, "--imatrix goes neither"),
        ({"method": "up", "keep": 0.5, "extended": True}, "--imatrix goes neither"),
        ({"method": "up", "keep": 0.5, "samples": 3}, "only with --calibrate"),
        ({"method": "quantize", "bits": 4, "of": "rest"}, "no experts are compressed"),
    ],
)
def test_options_that_do_not_go_with_it(moe, tmp_path, options, said):
    with pytest.raises(InputError, match=said):
        moe_jax.compress(moe, **options, imatrix=imatrix_of(moe, tmp_path / "imatrix.gguf"))


def test_the_command_takes_it(moe, tmp_path, capsys):
    moe_jax.save(moe, tmp_path / "moe")
    file = imatrix_of(moe, tmp_path / "imatrix.gguf")
    command = ["compress", str(tmp_path / "moe"), str(tmp_path / "small"), "--method", "quantize", "--bits", "4"]
    assert main([*command, "--imatrix", str(tmp_path / "none")]) == 2
    assert "there is no imatrix file" in capsys.readouterr().err
    assert main([*command, "--imatrix", str(file)]) == 0
    assert moe_jax.load(tmp_path / "small").lineage[-1]["options"]["imatrix"] == str(file)


@long
def test_what_a_text_gave_is_kept_for_another_job(text_of_words, tmp_path):
    """The squares are those of a plain computation, and the file is read again."""
    moe, text = text_of_words
    file, folder = tmp_path / "kept.gguf", tmp_path / "recorded"
    given = {"calibrate": text, "seq_len": 24, "samples": 6, "calibration_dir": folder, "save_imatrix": file}
    moe_jax.compress(moe, **QUANTIZE, **given)
    source = open_model(moe)
    importance = read_expert_importance(file, source, source.config.moe_layers)
    (recorded,) = (one.parent for one in folder.rglob("calibration.json"))
    for layer in source.config.moe_layers:
        rows = read_layer(recorded, layer).rows
        x = rows.inputs.astype(np.float64)
        spread = np.linspace(0, len(x) - 1, min(512, len(x))).astype(int)
        kernels = {name: source.read(f"layers/{layer}/mlp/experts/{name}/kernel") for name in ("gate", "up", "down")}
        for expert in range(source.config.moe(layer).bank_experts):
            weights = np.where(rows.experts == expert, rows.weights, 0).astype(np.float64).sum(axis=1) ** 2
            chosen = (rows.experts == expert).any(axis=1)
            usual = weights[chosen].mean() if chosen.any() else 1.0
            np.add.at(weights, spread, usual * 64 / len(spread))
            gate, up = (x @ kernels[name][expert].astype(np.float64) for name in ("gate", "up"))
            hidden = gate / (1 + np.exp(-gate)) * up
            for name, values in (("inputs", x), ("hidden", hidden)):
                expected = weights @ values**2 / weights.sum()
                np.testing.assert_allclose(importance[layer][name][expert], expected, rtol=1e-4)
    small = moe_jax.compress(moe, **QUANTIZE, imatrix=file)
    assert small.lineage[-1]["options"]["imatrix"] == str(file)
    with pytest.raises(InputError, match="exists"):
        moe_jax.compress(moe, **QUANTIZE, **given)


def test_where_no_imatrix_can_be_kept(text_of_words, tmp_path):
    moe, text = text_of_words
    with pytest.raises(InputError, match="only with --calibrate"):
        moe_jax.compress(moe, **QUANTIZE, save_imatrix=tmp_path / "kept.gguf")
    with pytest.raises(InputError, match="not with --sweep"):
        SweepSpec(text=text, calibrate=text, save_imatrix=tmp_path / "kept.gguf")
