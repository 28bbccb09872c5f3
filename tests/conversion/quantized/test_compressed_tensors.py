"""Checkpoints of compressed-tensors: the numbers that the package decodes them to, and the logits of Transformers."""

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import pack_to_int32

import moe_jax
from moe_jax.conversion import convert
from moe_jax.conversion.spec import ConvertSpec
from tests.support.compressed_weights import assert_decoded, folded, group, in_codes, settings
from tests.support.numerics import logits_of
from tests.support.quantized_checkpoints import (
    QUIET,
    assert_reads_as,
    is_quantised,
    leaves_of,
    plain_checkpoint,
    write_quantised,
)

TOKENS = [[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]]
LINEAR = ["Linear"]
WEIGHT = "model.layers.0.mlp.up_proj.weight"
EVERY, ROW, GROUP = {"strategy": "tensor"}, {"strategy": "channel"}, {"strategy": "group", "group_size": 16}
BLOCK = {"strategy": "block", "block_structure": [24, 32]}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def check(folder, format, shape, *, scales_as=None, **args):
    stored, values = in_codes(format, scales_as=scales_as, **args)(WEIGHT, drawn(*shape))
    assert_decoded(folder, stored, settings(group(LINEAR, format, **args)), {WEIGHT: values})


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shared", [EVERY, ROW, GROUP], ids=lambda shared: shared["strategy"])
def test_packed_integers(bits, symmetric, shared, tmp_path):
    check(tmp_path, "pack-quantized", (75, 48), num_bits=bits, symmetric=symmetric, **shared)


@pytest.mark.parametrize("bits", [3, 4])
def test_rows_that_do_not_fill_their_last_word(bits, tmp_path):
    check(tmp_path, "pack-quantized", (5, 37), num_bits=bits, symmetric=False, **ROW)


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shared", [EVERY, ROW, GROUP, BLOCK], ids=lambda shared: shared["strategy"])
def test_integers_of_a_byte_each(format, symmetric, shared, tmp_path):
    bits = 8 if format == "int-quantized" else 4
    check(tmp_path, format, (75, 80), num_bits=bits, symmetric=symmetric, **shared)


@pytest.mark.parametrize("shared", [EVERY, ROW, GROUP, BLOCK], ids=lambda shared: shared["strategy"])
def test_fp8(shared, tmp_path):
    check(tmp_path, "float-quantized", (75, 80), num_bits=8, type="float", **shared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_in_half_precision(dtype, tmp_path):
    check(tmp_path, "pack-quantized", (75, 48), scales_as=dtype, num_bits=4, **GROUP)


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}


@pytest.mark.parametrize(
    ("format", "args"),
    [
        ("nvfp4-pack-quantized", NVFP4),
        ("mxfp4-pack-quantized", MX | {"num_bits": 4}),
        ("mxfp8-quantized", MX | {"num_bits": 8}),
    ],
)
def test_numbers_with_scales_of_a_byte(format, args, tmp_path):
    check(tmp_path, format, (75, 96), **args)


def test_a_last_group_that_is_shorter(tmp_path):
    """The package has whole groups; what it makes of a wider matrix is cut off."""
    stored, values = in_codes("int-quantized", num_bits=4, **GROUP)(WEIGHT, drawn(20, 48))
    packed = {
        f"{WEIGHT}_packed": pack_to_int32(stored[WEIGHT][:, :41].contiguous(), 4),
        f"{WEIGHT}_scale": stored[f"{WEIGHT}_scale"],
        f"{WEIGHT}_shape": torch.tensor([20, 41]),
    }
    config = settings(group(LINEAR, "pack-quantized", num_bits=4, **GROUP))
    assert_decoded(tmp_path, packed, config, {WEIGHT: values[:, :41]})


@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_in_groups_of_any_order(symmetric, tmp_path):
    """Columns in the order of their groups are what the package decodes; here they are mixed, codes and all."""
    args = {"num_bits": 4, "symmetric": symmetric, **GROUP}
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    whole, values = in_codes("int-quantized", **args)(WEIGHT, drawn(40, 48))
    packed, _ = in_codes("pack-quantized", **args)(WEIGHT, drawn(40, 48))
    packed |= {
        f"{WEIGHT}_packed": pack_to_int32(whole[WEIGHT][:, order].contiguous(), 4),
        f"{WEIGHT}_g_idx": (order // 16).to(torch.int32),
    }
    config = settings(group(LINEAR, "pack-quantized", **args))
    assert_decoded(tmp_path, packed, config, {WEIGHT: values[:, order]})
    ordered, _ = in_codes("pack-quantized", **args)(WEIGHT, drawn(40, 48))
    unset = {f"{WEIGHT}_g_idx": torch.full((48,), -1, dtype=torch.int32)}
    assert_decoded(tmp_path, ordered | unset, config, {WEIGHT: values})


# --- groups of the config -------------------------------------------------------------------------


def test_every_group_has_its_own_bits(tmp_path):
    """A name comes before a pattern that comes later, both before a class; what is in codes is so wherever it is."""
    given = {
        "model.layers.0.self_attn.q_proj": ("pack-quantized", {"num_bits": 8, **ROW}),
        "model.layers.0.mlp.experts.3.up_proj": ("pack-quantized", {"num_bits": 3, **GROUP, "symmetric": False}),
        "model.layers.0.mlp.shared.up_proj": ("pack-quantized", {"num_bits": 4, **GROUP}),
        "lm_head": ("pack-quantized", {"num_bits": 4, **GROUP}),  # although it is to be ignored
        "model.embed_tokens": ("pack-quantized", {"num_bits": 2, **ROW}),
        "model.layers.0.self_attn.k_proj": ("float-quantized", {"num_bits": 8, "type": "float", **BLOCK}),
        "model.layers.0.self_attn.v_proj": ("nvfp4-pack-quantized", NVFP4),
    }
    targets = [["model.layers.0.self_attn.q_proj"], [r"re:.*experts\.\d+\.(gate|up|down)_proj$"], LINEAR, None,
               ["Embedding"], [r"re:.*self_attn\.[qk]_proj"], [r"re:.*v_proj"]]  # fmt: skip
    stored, expected, groups = {}, {}, []
    for (module, (format, args)), chosen in zip(given.items(), targets, strict=True):
        tensors, expected[f"{module}.weight"] = in_codes(format, **args)(f"{module}.weight", drawn(40, 48))
        stored |= tensors
        groups += [] if chosen is None else [group(chosen, format, **args)]
    plain = {"model.norm.weight": drawn(48), "model.layers.0.self_attn.o_proj.weight": drawn(48, 48)}
    assert_decoded(tmp_path, stored | plain, settings(*groups), expected | plain)


def test_groups_of_other_numbers_do_not_count(tmp_path):
    """All in FP8 are of one group, whatever it is for, beside one of a class whose numbers have four bits."""
    wide, narrow = {"num_bits": 8, "type": "float", **BLOCK}, NVFP4
    stored, values = in_codes("float-quantized", **wide)(WEIGHT, drawn(40, 48))
    groups = group(LINEAR, "nvfp4-pack-quantized", **narrow), group(["re:other"], "float-quantized", **wide)
    assert_decoded(tmp_path, stored, settings(*groups), {WEIGHT: values})


def test_what_is_not_for_weights_is_left_out(tmp_path):
    args = {"num_bits": 8, "type": "float", **EVERY}
    stored, values = in_codes("float-quantized", **args)(WEIGHT, drawn(40, 48))
    stored |= {
        WEIGHT.replace("weight", "input_scale"): torch.ones(1),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
    }
    one = group(LINEAR, "float-quantized", **args)
    activations = {"targets": ["re:.*attn"], "weights": None, "input_activations": one["weights"]}
    config = settings(one, transform_config={}, sparsity_config={"format": "dense"}, version="0.20.1")
    config["config_groups"]["group_1"] = activations
    assert_decoded(tmp_path, stored, config, {WEIGHT: values})


def test_weights_that_are_rounded_later_are_read_as_they_are(tmp_path):
    weight = drawn(40, 48).to(torch.bfloat16)
    stored = {WEIGHT: weight, f"{WEIGHT}_scale": torch.ones(40, 1), f"{WEIGHT}_zero_point": torch.zeros(40, 1).char()}
    config = settings(group(LINEAR, "dense", num_bits=8, **ROW)) | {"quantization_status": "frozen"}
    found = folded(tmp_path, stored, config)
    assert list(found) == [WEIGHT]
    assert (found[WEIGHT].dtype, found[WEIGHT].coded) == ("BF16", None)


# --- whole models ---------------------------------------------------------------------------------


def assert_same_logits(folder, model):
    told = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=told)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(TOKENS)).logits.numpy()
    ours = np.asarray(logits_of(moe_jax.load(model).decoder, np.asarray(TOKENS, np.int32)))
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "format", "args"),
    [
        # Transformers does not read experts with zero points.
        ("llama", "pack-quantized", {"num_bits": 4, "symmetric": False, **GROUP}),
        ("mixtral", "pack-quantized", {"num_bits": 4, **GROUP}),
        ("qwen3_moe", "float-quantized", {"num_bits": 8, "type": "float", **ROW}),
        ("deepseek_v3", "float-quantized", {"num_bits": 8, "type": "float", **EVERY}),
    ],
)
def test_models_compute_what_those_of_transformers_do(name, format, args, tmp_path):
    wide = {"moe_intermediate_size": 32} if name == "qwen3_moe" else {}
    both = write_quantised(
        plain_checkpoint(tmp_path / "plain", name, **wide),
        tmp_path,
        in_codes(format, **args),
        settings(group(LINEAR, format, **args)),
    )
    assert_same_logits(both[0], assert_reads_as(*both, tmp_path))


def test_experts_in_codes_beside_attention_in_others(tmp_path):
    """As Kimi is published; the rest of a model with latent attention has 12 and 24 columns."""
    experts, attention = {"num_bits": 4, "strategy": "group", "group_size": 8}, {"num_bits": 8, "type": "float", **ROW}
    in_experts, in_attention = in_codes("pack-quantized", **experts), in_codes("float-quantized", **attention)
    plain = plain_checkpoint(tmp_path / "plain", "deepseek_v3")
    both = write_quantised(
        plain,
        tmp_path,
        lambda name, weight: (in_experts if ".experts." in name else in_attention)(name, weight),
        settings(
            group([r"re:.*\.experts\.\d+\..*"], "pack-quantized", **experts),
            group([r"re:.*self_attn.*"], "float-quantized", **attention),
        ),
        lambda name, weight: is_quantised(name, weight) and (".experts." in name or "self_attn" in name),
    )
    assert_reads_as(*both, tmp_path)


@pytest.mark.parametrize(("bits", "dtype"), [(4, "float32"), (8, "float32"), (4, "bfloat16")])
def test_our_own_export_is_read_back(bits, dtype, tmp_path):
    """To the very numbers that the same model has where it is exported without codes."""
    model, small = tmp_path / "model", tmp_path / "small"
    convert(plain_checkpoint(tmp_path / "plain", "mixtral"), model, ConvertSpec(dtype=dtype), console=QUIET)
    moe_jax.compress(model, small, method="quantize", bits=bits, group_size=16, levels="even")
    moe_jax.export(small, tmp_path / "packed", format="compressed-tensors")
    moe_jax.export(small, tmp_path / "whole")
    packed, whole = (
        leaves_of(tmp_path / "packed", tmp_path / "ours"),
        leaves_of(tmp_path / "whole", tmp_path / "theirs"),
    )
    assert packed.keys() == whole.keys()
    for path, values in whole.items():
        # What is decoded is float32, and is rounded to the dtype of the model where it is exported whole.
        np.testing.assert_array_equal(packed[path].astype(values.dtype), values, err_msg=path)
