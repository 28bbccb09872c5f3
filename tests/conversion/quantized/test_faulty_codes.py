"""Faults of checkpoints in codes, of compressed-tensors, ModelOpt and gpt-oss: one line each, and nothing else."""

import re
from typing import Any

import pytest
import torch

from moe_jax.conversion.formats import format_of
from moe_jax.conversion.torch_file import read_torch_file
from moe_jax.core.errors import InputError
from tests.support.compressed_weights import group, in_codes, settings
from tests.support.faulty_codes import assert_only_input_errors, cast, cut, read, with_first, without
from tests.support.tiers import long

MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = f"{MODULE}.weight"
PACKED, SCALE, ZERO = f"{WEIGHT}_packed", f"{WEIGHT}_scale", f"{WEIGHT}_zero_point"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INTEGERS = {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 32]}


def written(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of one matrix [40, 48] in codes, and the config."""
    weight = torch.randn((40, 48), generator=torch.Generator().manual_seed(0))
    if kind == "mxfp4":
        blocks, scales = torch.arange(2 * 40 * 2 * 16).reshape(2, 40, 2, 16) % 256, torch.full((2, 40, 2), 120)
        stored = {f"{EXPERTS}_blocks": blocks.to(torch.uint8), f"{EXPERTS}_scales": scales.to(torch.uint8)}
        return stored, {"quant_method": "mxfp4"}
    format, args = {
        "packed": ("pack-quantized", INTEGERS),
        "bytes": ("int-quantized", INTEGERS | {"num_bits": 8}),
        "fp8": ("float-quantized", FP8),
        "nvfp4": ("nvfp4-pack-quantized", NVFP4),
        "modelopt": ("nvfp4-pack-quantized", NVFP4),
    }[kind]
    stored, _ = in_codes(format, **args)(WEIGHT, weight)
    if kind == "packed":
        stored[f"{WEIGHT}_g_idx"] = (torch.arange(48) // 16).to(torch.int32)
    if kind == "modelopt":
        stored = {WEIGHT: stored[PACKED], SCALE: stored[SCALE], f"{WEIGHT}_scale_2": stored[f"{WEIGHT}_global_scale"]}
        return stored, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return stored, settings(group(["Linear"], format, **args))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("packed", without(SCALE), "weight_scale is missing"),
        ("packed", without(ZERO), "weight_zero_point is missing"),
        ("packed", without(f"{WEIGHT}_shape"), "weight_shape is missing"),
        ("packed", cut(SCALE), "weight_scale has shape"),
        ("packed", cut(ZERO), "weight_zero_point has shape"),
        ("packed", cut(PACKED), "weight_packed has shape"),
        ("packed", cut(PACKED, 1), "weight_packed has shape"),
        ("packed", cast(SCALE, torch.int32), "weight_scale has dtype"),
        ("packed", cast(PACKED, torch.int64), "weight_packed has dtype"),
        ("packed", with_first(SCALE, float("nan")), "not finite"),
        ("packed", with_first(f"{WEIGHT}_shape", 41), "weight_shape says"),
        ("packed", with_first(f"{WEIGHT}_shape", -40), "weight_shape says"),
        ("packed", with_first(f"{WEIGHT}_shape", 1 << 62), "weight_shape says"),
        ("packed", cut(f"{WEIGHT}_shape"), "weight_shape has shape"),
        ("packed", with_first(f"{WEIGHT}_g_idx", 3), "g_idx names groups"),
        ("packed", with_first(f"{WEIGHT}_g_idx", -1), "g_idx names groups"),
        ("packed", cut(f"{WEIGHT}_g_idx"), "g_idx has shape"),
        ("bytes", without(SCALE), "weight_scale is missing"),
        ("bytes", without(ZERO), "weight_zero_point is missing"),
        ("bytes", cut(WEIGHT), "weight_scale has shape"),
        ("bytes", with_first(SCALE, float("inf")), "not finite"),
        ("bytes", cast(WEIGHT, torch.float32), "expected codes"),
        ("fp8", without(SCALE), "weight_scale is missing"),
        ("fp8", cut(SCALE), "weight_scale has shape"),
        ("fp8", with_first(SCALE, float("nan")), "not finite"),
        ("nvfp4", without(SCALE), "weight_scale is missing"),
        ("nvfp4", without(f"{WEIGHT}_global_scale"), "weight_global_scale is missing"),
        ("nvfp4", cut(PACKED), "weight_scale has shape"),
        ("nvfp4", with_first(SCALE, float("nan")), "not finite"),
        ("nvfp4", with_first(f"{WEIGHT}_global_scale", 0), "not finite"),
        ("modelopt", without(SCALE), "weight_scale is missing"),
        ("modelopt", without(f"{WEIGHT}_scale_2"), "weight_scale_2 is missing"),
        ("modelopt", cut(SCALE, 1), "weight_scale has shape"),
        ("modelopt", with_first(f"{WEIGHT}_scale_2", float("inf")), "not finite"),
        ("mxfp4", without(f"{EXPERTS}_scales"), "_scales is missing"),
        ("mxfp4", without(f"{EXPERTS}_blocks"), "_blocks is missing"),
        ("mxfp4", cut(f"{EXPERTS}_scales", 2), "_scales has shape"),
        ("mxfp4", cut(f"{EXPERTS}_blocks", 3), "_blocks has shape"),
        ("mxfp4", with_first(f"{EXPERTS}_scales", 255), "not finite"),
    ],
)
def test_faults_of_tensors(kind, change, message, tmp_path):
    stored, config = written(kind)
    read(tmp_path, stored, config)
    change(stored)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read(tmp_path, stored, config)
    assert "\n" not in str(caught.value)


def weights(**changed):
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"} | changed}}}


ROTATED = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "pack-quantised"}, "'pack-quantized'"),
        ({"format": "marlin-24"}, "expected one of"),
        ({"format": 3}, "expected one of"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "expected 'dense'"),
        ({"sparsity_config": 3}, "expected 'dense'"),
        ({"transform_config": ROTATED}, "rotates at 'input'"),
        ({"transform_config": [1]}, "transform_config"),
        ({"transform_config": {"config_groups": [1]}}, "transform_config"),
        ({"config_groups": 3}, "expected an object"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "expected an object"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "targets"),
        ({"config_groups": {"group_0": {"targets": ["re:("], "weights": {}}}}, "regular expression"),
        ({"config_groups": {"group_0": {"targets": ["re:(.*a)*b"], "weights": {}}}}, "that repeats repeats"),
        ({"config_groups": {"group_0": {"targets": ["re:.*.*.*.*.*.*b"], "weights": {}}}}, "that repeats repeats"),
        (weights(num_bits=9), "num_bits"),
        (weights(num_bits=True), "num_bits"),
        (weights(num_bits=5, type="float"), "num_bits"),
        (weights(type="nf4"), "type"),
        (weights(symmetric=1), "symmetric"),
        (weights(strategy="token"), "strategy"),
        (weights(strategy="group"), "group_size"),
        (weights(strategy="group", group_size=0), "group_size"),
        (weights(strategy="block"), "block_structure"),
        (weights(strategy="block", block_structure=[0, 8]), "block_structure"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "NVFP4"),
        ({"quant_method": "modelopt"}, "quant_algo"),
    ],
)
def test_faults_of_configs(changed, message):
    with pytest.raises(InputError, match=message) as caught:
        format_of({"quantization_config": {"quant_method": "compressed-tensors"} | changed})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bits", [3, 5, 8])
def test_bits_that_are_not_those_of_the_codes(bits, tmp_path):
    stored, config = written("packed")
    config["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    with pytest.raises(InputError, match="weight_packed has shape"):
        read(tmp_path, stored, config)


def test_codes_that_no_group_is_for(tmp_path):
    stored, config = written("packed")
    one = config["config_groups"]["group_0"] | {"targets": ["model.other"]}
    other = one | {"weights": one["weights"] | {"num_bits": 8}}
    config["config_groups"] = {"group_0": one, "group_1": other}
    with pytest.raises(InputError, match="no group"):
        read(tmp_path, stored, config)


def test_codes_that_are_not_stored_by_rows(tmp_path):
    """As in files of PyTorch, which hold views."""
    stored, config = written("bytes")
    file = tmp_path / "model.bin"
    torch.save(stored | {WEIGHT: stored[WEIGHT].T.contiguous().T}, file)
    chosen = format_of({"quantization_config": config})
    assert chosen is not None
    with pytest.raises(InputError, match="strides"):
        chosen.folded(read_torch_file(file))


# --- mutations ------------------------------------------------------------------------------------

KINDS = ("packed", "bytes", "fp8", "nvfp4", "modelopt", "mxfp4")


def test_mutations_are_read_or_refused(tmp_path):
    assert_only_input_errors(tmp_path, written, KINDS, range(200))


@long
def test_many_mutations_are_read_or_refused(tmp_path):
    assert_only_input_errors(tmp_path, written, KINDS, range(200, 5000))
