"""Experts in codes for other libraries: layers that are not as wide, or hold more, than what is written."""

import dataclasses
import pathlib

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

import moe_jax
from moe_jax.api.transforms import packed_parts
from moe_jax.commands.cli import main
from moe_jax.conversion.to_hugging_face import export
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig, ModelConfig
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.moe_models import moe_config, trained_leaves

QUIET = Console(quiet=True)
D, F = 16, 32


def written(folder: pathlib.Path, config: ModelConfig, dense: ModelConfig) -> ModelDirectory:
    return ModelDirectory(write_model(folder, config, trained_leaves(config, random_leaves(dense))))


def tensors_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def kernel_of(folder: pathlib.Path, tensor: str) -> np.ndarray:
    """What 4-bit codes of a checkpoint stand for, [out, in]."""
    parts = {part: tensors_of(folder)[f"{tensor}_{part}"] for part in ("packed", "scale", "shape")}
    nibbles = parts["packed"].view(np.uint8)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(len(nibbles), -1)[:, : parts["shape"][1]]
    scales = parts["scale"].astype(np.float32)
    return (codes.astype(np.float32) - 8) * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def test_a_universal_ffn_in_the_bank_is_no_routed_expert(tmp_path):
    """The bank has codes for one kernel more than the router has outputs: it stands beside them, merged."""
    dense = dense_config(num_layers=1, d_model=D, dim=F)
    bank = BankConfig(kind="low-rank", rank=2)
    written(tmp_path / "moe", moe_config(dense, bank, universal="med", extended=True), dense)
    options = {"method": "quantize", "bits": 4, "group_size": 8, "levels": "even"}
    moe_jax.compress(tmp_path / "moe", tmp_path / "small", **options)
    export(ModelDirectory(tmp_path / "small"), tmp_path / "packed", packed=packed_parts(), console=QUIET)
    export(ModelDirectory(tmp_path / "small"), tmp_path / "plain", console=QUIET)
    files = tensors_of(tmp_path / "plain")
    for expert in range(3):
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        np.testing.assert_allclose(kernel_of(tmp_path / "packed", name), files[name], rtol=1e-6)
    assert "model.layers.0.mlp.shared_expert.down_proj.weight" in tensors_of(tmp_path / "packed")


def test_narrower_layers_are_padded_before_they_are_coded(tmp_path):
    """All layers are written as wide as the widest; groups have to fit that."""
    dense = dense_config(num_layers=2, d_model=D, dim=F)
    narrow = dataclasses.replace(dense.layers[0], mlp=dataclasses.replace(dense.ffn(0), dim=24))
    dense = dataclasses.replace(dense, layers=(narrow, dense.layers[1]))
    written(tmp_path / "moe", moe_config(dense, BankConfig(), BankConfig()), dense)
    options = {"method": "quantize", "bits": 4, "group_size": 8, "levels": "even"}
    moe_jax.compress(tmp_path / "moe", tmp_path / "small", **options)
    for folder, group_size in (("same", 8), ("wider", 16)):
        packing = packed_parts({"experts": "4"}, group_size)
        export(ModelDirectory(tmp_path / "small"), tmp_path / folder, packed=packing, console=QUIET)
        assert kernel_of(tmp_path / folder, "model.layers.0.block_sparse_moe.experts.1.w2.weight").shape == (D, F)
    export(ModelDirectory(tmp_path / "small"), tmp_path / "plain", console=QUIET)
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    plain, packed = tensors_of(tmp_path / "plain")[name], kernel_of(tmp_path / "same", name)
    assert np.linalg.norm(packed - plain) < 0.01 * np.linalg.norm(plain) and not packed[:, 24:].any()


def test_groups_fit_of_themselves_and_what_becomes_of_codes_is_said(tmp_path, capsys):
    """Codes in groups that no other library has are rounded again; as a checkpoint, experts are whole."""
    dense = dense_config(num_layers=1, d_model=48, dim=96)
    written(tmp_path / "moe", moe_config(dense, BankConfig()), dense)
    for group_size in (16, 32):
        options = {"method": "quantize", "bits": 4, "group_size": group_size, "levels": "even"}
        moe_jax.compress(tmp_path / "moe", tmp_path / str(group_size), **options)
    packed = ("--format", "compressed-tensors")
    cases = {
        ("moe", *packed): "experts are in 4 bits, 48 inputs to a scale: rounded\n",
        ("16", *packed): "experts are in 4 bits, 16 inputs to a scale: the codes that they have\n",
        ("32", *packed): "48 inputs to a scale: rounded again, from 4 bits, 32 inputs to a scale",
        ("16",): "experts grow from 25.9 kB to 165.9 kB: ",
    }
    for (name, *more), line in cases.items():
        assert main(["export", str(tmp_path / name), str(tmp_path / "out"), *more, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert line in said, said
        assert ("the format has whole experts only; the model directory" in said) != bool(more)


@pytest.mark.parametrize("group_size", [0, -8, -128, 4])
def test_groups_of_no_size(group_size, tmp_path):
    dense = dense_config(num_layers=1, d_model=D, dim=F)
    config = moe_config(dense, BankConfig())
    source = written(tmp_path / "moe", config, dense)
    with pytest.raises(InputError, match=f"--group-size {group_size} must .* 8"):
        export(source, tmp_path / "packed", packed=packed_parts({"experts": "4"}, group_size), console=QUIET)


def test_a_dense_model_has_no_experts_to_write_in_codes(tmp_path):
    dense = dense_config(num_layers=1, d_model=D, dim=F)
    source = ModelDirectory(write_model(tmp_path / "dense", dense, random_leaves(dense)))
    with pytest.raises(InputError, match="model is dense"):
        export(source, tmp_path / "packed", packed=packed_parts(), console=QUIET)
