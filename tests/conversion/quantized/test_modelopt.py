"""Checkpoints of ModelOpt: the numbers that compressed-tensors makes of them, and of what it converts them to."""

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

from tests.support.compressed_weights import assert_decoded, folded, in_codes, read_whole
from tests.support.quantized_checkpoints import assert_reads_as, plain_checkpoint, write_quantised

WEIGHT = "model.layers.0.mlp.up_proj.weight"
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def in_nvfp4(name, weight):
    """A weight as ModelOpt stores it, and its numbers: the products are in another order than in compressed-tensors."""
    module = name.removesuffix(".weight")
    stored, _ = in_codes("nvfp4-pack-quantized", **NVFP4)(name, weight)
    packed, scales = stored[f"{name}_packed"], stored[f"{name}_scale"]
    whole = (1 / stored[f"{name}_global_scale"]).reshape(())
    made = {name: packed, f"{name}_scale": scales, f"{name}_scale_2": whole, f"{module}.input_scale": torch.ones(())}
    halves = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(len(packed), -1)
    numbers = halves.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return made, torch.from_numpy(numbers) * (scales.float() * whole).repeat_interleave(16, 1)


def in_fp8(name, weight):
    stored, values = in_codes("float-quantized", **FP8)(name, weight)
    stored[f"{name}_scale"] = stored[f"{name}_scale"].reshape(())
    return stored | {name.replace("weight", "input_scale"): torch.ones(())}, values


def config(algorithm, method="modelopt"):
    return {"quant_method": method, "quant_algo": algorithm, "ignore": ["lm_head"], "producer": {"name": "modelopt"}}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4"])
def test_nvfp4(method, tmp_path):
    stored, values = in_nvfp4(WEIGHT, drawn(75, 80))
    assert_decoded(tmp_path, stored, config("NVFP4", method), {WEIGHT: values})


def test_nvfp4_is_what_the_package_converts_it_to(tmp_path):
    """With a scale of the whole that is a power of two, one over which is exact."""
    stored, _ = in_nvfp4(WEIGHT, drawn(75, 80))
    stored[f"{WEIGHT}_scale_2"] = torch.tensor(2.0**-9)
    ours = folded(tmp_path, stored, config("NVFP4"))
    theirs = ModelOptNvfp4Converter(targets=[r"re:.*proj$"]).process(dict(stored))
    assert f"{WEIGHT}_global_scale" in theirs
    (tmp_path / "theirs").mkdir()
    method = {"quant_method": "compressed-tensors"}
    assert_decoded(tmp_path / "theirs", theirs, method, {WEIGHT: read_whole(ours[WEIGHT])})


@pytest.mark.parametrize("algorithm", ["FP8", "MIXED_PRECISION"])
def test_fp8(algorithm, tmp_path):
    stored, values = in_fp8(WEIGHT, drawn(75, 81))
    stored |= {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(()), "model.norm.weight": drawn(8)}
    assert_decoded(tmp_path, stored, config(algorithm), {WEIGHT: values, "model.norm.weight": drawn(8)})


@pytest.mark.parametrize(
    ("name", "quantise", "algorithm"), [("qwen3_moe", in_nvfp4, "NVFP4"), ("llama", in_fp8, "FP8")]
)
def test_models_have_those_numbers(name, quantise, algorithm, tmp_path):
    wide = {"moe_intermediate_size": 32} if name == "qwen3_moe" else {}
    plain = plain_checkpoint(tmp_path / "plain", name, **wide)
    assert_reads_as(*write_quantised(plain, tmp_path, quantise, config(algorithm)), tmp_path)
