"""Experts in codes: what Transformers makes of them is what our own model computes."""

import copy
import json
import pathlib

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.conversion import convert
from moe_jax.conversion.hugging_face_dir import open_checkpoint
from moe_jax.conversion.spec import ConvertSpec
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.hf_checkpoints import CONFIGS
from tests.support.numerics import logits_of
from tests.support.tiers import long, one_in

QUIET = Console(quiet=True)
TOKENS = [[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]]
NAMES = ("mixtral", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> a small random model of ours whose experts have 32 inputs and 64 neurons, so that groups fit."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str) -> pathlib.Path:
        folder = root / name
        if not folder.exists():
            torch.manual_seed(0)
            width = "intermediate_size" if name == "mixtral" else "moe_intermediate_size"
            given = copy.deepcopy(CONFIGS[name]) | {width: 64}
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**given), dtype=torch.float32
            )
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
            model.save_pretrained(root / f"{name}-hf", save_original_format=True)
            convert(root / f"{name}-hf", folder, console=QUIET)
        return folder

    return make


def loaded(folder: pathlib.Path, *, dequantize: bool):
    """The model as Transformers reads it, of itself or told to make floats of codes; no weight is missing."""
    told = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, **told
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def assert_same_logits(folder: pathlib.Path, model, *, dequantize: bool = True) -> None:
    with torch.no_grad():
        theirs = loaded(folder, dequantize=dequantize)(torch.tensor(TOKENS)).logits.numpy()
    ours = np.asarray(logits_of(moe_jax.load(model).decoder, np.asarray(TOKENS, np.int32)))
    np.testing.assert_allclose(theirs, ours, atol=2e-4 * np.abs(ours).max())


@long
@one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_plain_codes_are_exported_as_they_are(models, tmp_path, name):
    bits = 8 if name == "qwen3_moe" else 4
    small = tmp_path / "small"
    moe_jax.compress(models(name), small, method="quantize", bits=bits, group_size=16, levels="even")
    moe_jax.export(small, tmp_path / "packed", format="compressed-tensors")
    assert_same_logits(tmp_path / "packed", small, dequantize=name != "mixtral")
    said = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    source, found = ModelDirectory(small), open_checkpoint(tmp_path / "packed").tensors
    layer = source.config.moe_layers[0]
    codes = source.read(f"layers/{layer}/mlp/experts/delta/up/codes")
    packed = [entry for tensor, entry in found.items() if f"layers.{layer}." in tensor and tensor.endswith("_packed")]
    assert sum(entry.nbytes for entry in packed) == 3 * codes.nbytes  # of gate, up and down


@long
def test_experts_around_a_centre_are_merged_and_rounded(models, tmp_path):
    """The same codes as of the merged experts, quantised in 4 bits on the even grid."""
    small, merged, rounded = tmp_path / "small", tmp_path / "merged", tmp_path / "rounded"
    moe_jax.compress(models("mixtral"), small, method="resmoe", keep=0.3)
    moe_jax.export(small, tmp_path / "packed", format="compressed-tensors", bits=4, group_size=16)
    moe_jax.export(small, merged)
    moe_jax.compress(merged, rounded, method="quantize", bits=4, group_size=16, levels="even")
    assert_same_logits(tmp_path / "packed", rounded)


def test_bfloat16_models_load_too(models, tmp_path):
    bfloat16, small = tmp_path / "bfloat16", tmp_path / "small"
    convert(models("mixtral").with_name("mixtral-hf"), bfloat16, ConvertSpec(dtype="bfloat16"), console=QUIET)
    moe_jax.compress(bfloat16, small, method="quantize", bits=4, group_size=16, levels="even")
    moe_jax.export(small, tmp_path / "packed", format="compressed-tensors")
    scale = next(t for n, t in open_checkpoint(tmp_path / "packed").tensors.items() if n.endswith("weight_scale"))
    assert scale.dtype == "BF16"
    with torch.no_grad():
        theirs = loaded(tmp_path / "packed", dequantize=True)(torch.tensor(TOKENS)).logits.numpy()
    ours = np.asarray(logits_of(moe_jax.load(small).decoder, np.asarray(TOKENS, np.int32)))
    # There an entry is rounded to bfloat16 once it is multiplied by its scale.
    np.testing.assert_allclose(theirs, ours, atol=0.03 * np.abs(ours).max())


@pytest.mark.parametrize(
    ("compression", "export", "message"),
    [
        ({"bits": 4, "group_size": 16}, {}, "compress with --levels even"),
        ({"bits": 4, "group_size": 16, "levels": "even"}, {"group_size": 24}, "the 64 inputs of .*; try 32$"),
        ({"bits": 3, "group_size": 16}, {"group_size": 128}, "--group-size 128 must .* of 8 that divides"),
        ({"bits": 4, "group_size": 16, "levels": "even"}, {"expert_layout": "fused"}, "takes a matrix for"),
    ],
)
def test_what_cannot_be_written(models, tmp_path, compression, export, message):
    moe_jax.compress(models("mixtral"), tmp_path / "small", method="quantize", **compression)
    with pytest.raises(moe_jax.InputError, match=message):
        moe_jax.export(tmp_path / "small", tmp_path / "packed", format="compressed-tensors", **export)
    assert not (tmp_path / "packed").exists()


def test_as_a_command(models, tmp_path, capfd):
    model, packed = str(models("mixtral")), str(tmp_path / "packed")
    options = ("--format", "compressed-tensors", "--bits", "8", "--group-size", "16")
    assert main(["export", model, packed, *options, "--dry-run"]) == 0
    assert "experts are in 8 bits, 16 inputs to a scale: rounded\n" in capfd.readouterr().out
    assert main(["export", model, packed, *options]) == 0
    assert {"weight_packed", "weight_scale", "weight_shape"} <= {
        name.rpartition(".")[2] for name in open_checkpoint(pathlib.Path(packed)).tensors
    }
    capfd.readouterr()
    assert main(["export", model, str(tmp_path / "other"), "--bits", "8"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
