"""Experts compressed by an imatrix of llama.cpp in place of a text."""

from pathlib import Path

import numpy as np
import pytest

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.conversion.gguf.expert_importance import read_expert_importance
from moe_jax.conversion.gguf.imatrix import write_imatrix
from moe_jax.core.errors import InputError

EXPERTS = 4


@pytest.fixture(scope="module")
def moe():
    return moe_jax.tiny_model(experts=EXPERTS)


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
