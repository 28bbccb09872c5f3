"""The types of tensors in the mixes of llama.cpp, and what takes their place where rows do not fit."""

import gguf
import pytest

from moe_jax.conversion.gguf.gguf_types import (
    BLOCKS_BY_NAME,
    FILE_TYPES,
    NUMBERS,
    Facts,
    planned_tensor,
    said_of_fallbacks,
)
from moe_jax.conversion.spec import GGUF_TYPES

DENSE = Facts(num_layers=32, num_experts=0, heads_per_kv_head=4, is_tied=False)
SHAPE = (64, 512)


def kinds(mix, name, facts=DENSE, shape=SHAPE):
    """The types of a matrix in all layers, as runs: [type, number of layers, ...]."""
    runs = []
    for layer in range(facts.num_layers):
        kind = planned_tensor(f"blk.{layer}.{name}.weight", shape, "F32", mix, facts).kind
        if runs and runs[-2] == kind:
            runs[-1] += 1
        else:
            runs += [kind, 1]
    return runs


@pytest.mark.parametrize(
    ("mix", "name", "expected"),
    [
        ("Q4_K_M", "attn_q", ["Q4_K", 32]),
        ("Q4_K_S", "attn_v", ["Q5_K", 4, "Q4_K", 28]),
        ("Q4_K_S", "ffn_down", ["Q5_K", 4, "Q4_K", 28]),
        ("Q3_K_S", "attn_v", ["Q3_K", 32]),
        ("Q3_K_M", "attn_v", ["Q5_K", 2, "Q4_K", 30]),
        ("Q3_K_M", "ffn_down", ["Q5_K", 2, "Q4_K", 30]),
        ("Q3_K_M", "attn_output", ["Q4_K", 32]),
        ("Q3_K_L", "ffn_down", ["Q5_K", 32]),
        ("Q3_K_L", "ffn_up", ["Q3_K", 32]),
        ("Q2_K", "attn_v", ["Q4_K", 32]),
        ("Q2_K", "attn_output", ["Q3_K", 32]),
        ("Q2_K", "ffn_gate", ["Q2_K", 32]),
        ("Q5_K_S", "ffn_down", ["Q5_K", 32]),
        ("Q6_K", "attn_v", ["Q6_K", 32]),
        ("Q4_0", "attn_v", ["Q4_0", 32]),
        ("BF16", "ffn_down", ["BF16", 32]),
        (None, "ffn_down", ["F32", 32]),
        ("Q4_K_M", "attn_v_b", ["Q4_K", 32]),
        ("Q2_K", "attn_k_b", ["Q2_K", 32]),
        ("Q3_K_L", "attn_kv_a_mqa", ["Q3_K", 32]),
    ],
)
def test_mixes(mix, name, expected):
    assert kinds(mix, name) == expected


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q5_K_M"])
@pytest.mark.parametrize("name", ["attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp"])
def test_more_bits_at_the_ends_and_in_every_third_layer(mix, name):
    facts = DENSE._replace(num_experts=4 if "exp" in name else 0)
    found = [planned_tensor(f"blk.{i}.{name}.weight", SHAPE, "F32", mix, facts).kind for i in range(32)]
    assert [i for i, kind in enumerate(found) if kind == "Q6_K"] == [
        0,
        1,
        2,
        3,
        6,
        9,
        12,
        15,
        18,
        21,
        24,
        27,
        28,
        29,
        30,
        31,
    ]
    assert set(found) == {"Q6_K", mix[:4]}


def test_what_a_mix_depends_on():
    assert kinds("Q2_K", "attn_v", DENSE._replace(heads_per_kv_head=2)) == ["Q3_K", 32]
    eight = DENSE._replace(num_experts=8)
    assert kinds("Q4_K_M", "attn_v", eight) == kinds("Q4_0", "attn_k", eight) == ["Q8_0", 32]
    assert kinds("Q4_K_M", "attn_output", eight) == ["Q5_K", 32]
    assert kinds("Q4_K_M", "attn_v_b", eight) == kinds("Q4_K_S", "attn_k_b", eight, (4, 512, 256)) == ["Q4_K", 32]
    assert kinds("Q4_K_M", "attn_k_b", eight, (128, 512, 128)) == ["Q5_0", 32]
    assert kinds("Q3_K_L", "attn_output", eight) == ["Q3_K", 32]
    assert kinds("Q4_K_S", "attn_v", DENSE._replace(num_layers=80)) == ["Q5_K", 80]
    for name, kind in (("output", "Q6_K"), ("token_embd", "Q4_K")):
        assert planned_tensor(f"{name}.weight", SHAPE, "F32", "Q4_K_M", DENSE).kind == kind
    tied = DENSE._replace(is_tied=True)
    assert planned_tensor("token_embd.weight", SHAPE, "F32", "Q4_K_M", tied).kind == "Q6_K"
    assert planned_tensor("token_embd.weight", SHAPE, "F32", "Q8_0", tied).kind == "Q8_0"
    assert planned_tensor("token_embd.weight", (64, 96), "F32", "Q4_K_M", tied).kind == "Q8_0"
    assert planned_tensor("output.weight", (64, 96), "F32", "Q4_0", DENSE).kind == "Q8_0"


@pytest.mark.parametrize("mix", [None, *GGUF_TYPES])
def test_norms_biases_and_routers_are_float32(mix):
    for name, shape in (
        ("blk.0.attn_norm.weight", (512,)), ("blk.0.attn_q.bias", (512,)), ("blk.0.attn_q_norm.weight", (4, 256)),
        ("blk.0.ffn_gate_inp.weight", SHAPE), ("blk.0.ffn_gate_inp_shexp.weight", (512,)),
    ):  # fmt: skip
        assert planned_tensor(name, shape, "BF16", mix, DENSE).kind == "F32"


@pytest.mark.parametrize(
    ("mix", "width", "kind"),
    [("Q4_K_S", 96, "Q5_0"), ("Q5_K_S", 96, "Q5_1"), ("Q6_K", 96, "Q8_0"), ("Q2_K", 96, "Q4_0"), ("Q3_K_S", 96, "Q4_0"),
     ("Q4_K_M", 80, "F16"), ("Q8_0", 80, "F16"), ("Q4_0", 80, "F16"), ("F16", 80, "F16")],
)  # fmt: skip
def test_rows_that_do_not_fit(mix, width, kind):
    tensors = {f"blk.{i}.ffn_up.weight": planned_tensor(f"blk.{i}.ffn_up.weight", (64, width), "F32", mix, DENSE)
               for i in (9, 10)}  # fmt: skip
    assert {one.kind for one in tensors.values()} == {kind}
    said = said_of_fallbacks(tensors)
    assert len(said) == (mix != "F16")
    if said:
        assert said[0].startswith(f"blk.{{i}}.ffn_up.weight (x2): {kind} in place of {mix[:4]}, as rows of {width} ")


def test_numbers_are_those_of_the_package():
    assert NUMBERS == {name: gguf.GGMLQuantizationType[name].value for name in NUMBERS}
    for name, blocks in BLOCKS_BY_NAME.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (blocks.elements, blocks.nbytes)
    numbers = {name.removeprefix("MOSTLY_").removeprefix("ALL_"): kind.value
               for name, kind in gguf.LlamaFileType.__members__.items()}  # fmt: skip
    assert {name: numbers[name] for name in GGUF_TYPES} == {name: FILE_TYPES[name] for name in GGUF_TYPES}
