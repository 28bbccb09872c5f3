"""Experts that stay in the codes of a quantised checkpoint, compared with those that it is decoded to."""

import pathlib

import numpy as np

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.experts.forms import ffn_matrices
from moe_jax.experts.on_host import expert_kernels
from moe_jax.model_io.model_dir import ModelDirectory


def kernels_of(model: pathlib.Path) -> dict[str, np.ndarray]:
    """The kernels of all experts, made whole."""
    source, kernels = ModelDirectory(model), {}
    for i in source.config.moe_layers:
        moe = source.config.moe(i)
        for name, matrix in ffn_matrices(moe.expert, source.config.d_model).items():
            experts = range(moe.routed_experts)
            bank = f"layers/{i}/mlp/experts"
            made = expert_kernels(source.read, moe.bank, bank, matrix, dtype=np.dtype(np.float32), experts=experts)
            kernels[f"{bank}/{name}/kernel"] = np.stack(list(made))
    return kernels


def assert_kept_as_decoded(folder: pathlib.Path, tmp_path: pathlib.Path, bits: str, capfd) -> None:
    """Whether the experts of a checkpoint that stay in codes, made whole, are those of the decoded one, bit for bit."""
    moe_jax.convert(folder, tmp_path / "made-whole")
    assert main(["convert", str(folder), str(tmp_path / "kept"), "--codes", "keep"]) == 0
    assert f"stay in codes, quantized, {bits} bits" in capfd.readouterr().err
    kept, decoded = kernels_of(tmp_path / "kept"), ModelDirectory(tmp_path / "made-whole")
    assert kept
    for path, kernels in kept.items():
        np.testing.assert_array_equal(kernels, decoded.read(path), err_msg=path)
    others = [path for path in ModelDirectory(tmp_path / "kept").specs() if "/experts/" not in path]
    for path in others:
        np.testing.assert_array_equal(ModelDirectory(tmp_path / "kept").read(path), decoded.read(path), err_msg=path)
