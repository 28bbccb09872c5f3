"""What a step sends and holds, counted by hand for a small model on 16 devices."""

import numpy as np
import pytest

from moe_jax.core.data_sheets import CHIPS
from moe_jax.experts.exchange import DEFAULT_CAPACITY
from moe_jax.models import BankConfig, FFNConfig
from moe_jax.planning import expected_step
from moe_jax.planning.expected_step import PlacedLeaf, _Step
from moe_jax.planning.hlo import Transfer
from moe_jax.training.recipe import ModelSection, TrainSection
from tests.support.training_models import ATTENTION, config_of, moe, recipe_of

MESH = {"data": 1, "fsdp": 2, "expert": 4, "sequence": 1, "tensor": 2}
D, F, E, K, ROWS, LENGTH, BFLOAT16, FLOAT32 = 16, 24, 4, 2, 32, 16, 2, 4
# Neighbours along an axis: the device numbers of a group, `tensor` the fastest axis.
TENSOR, EXPERT, FSDP = (0, 1), (0, 2, 4, 6), (0, 8)
FLOAT = np.dtype(np.float32)
LEAVES = {
    "embed": PlacedLeaf("embed/embedding", (264, D), 1, FLOAT, {"fsdp": 2, "tensor": 2}, True),
    "head": PlacedLeaf("lm_head/kernel", (D, 264), 1, FLOAT, {"fsdp": 2}, True),
    "norm": PlacedLeaf("segments/0/blocks/0/norm/scale", (D,), 2, FLOAT, {}, True),
    "dense": PlacedLeaf("segments/0/blocks/0/attention/q/kernel", (D, D), 2, FLOAT, {"fsdp": 2, "tensor": 2}, True),
    "experts": PlacedLeaf(
        "segments/0/blocks/0/mlp/experts/up/kernel", (E, D, F), 2, FLOAT, {"expert": 4, "fsdp": 2, "tensor": 2}, True
    ),
    "codes": PlacedLeaf(
        "segments/0/blocks/0/attention/k/nf4/codes", (D // 2, D), 2, np.dtype(np.uint8), {"fsdp": 2}, False
    ),
}


def a_step(*mlps, leaves=(), remat="none", accumulation=1, exchange=None, chip="v5e", tied=False, mesh=MESH) -> _Step:
    recipe = recipe_of(
        batch_size=ROWS,
        seq_len=LENGTH,
        model=ModelSection(config="c", init="random", compute_dtype="bfloat16", remat=remat, exchange=exchange),
        train=TrainSection(steps=1, batch_size=ROWS, accumulation=accumulation),
    )
    config = config_of(*(mlps or [FFNConfig(dim=F)]), tie_embeddings=tied)
    return _Step(recipe, config, [LEAVES[name] for name in leaves], mesh, CHIPS[chip])


def of_parameters(*leaves, **options) -> list[Transfer]:
    return [one for one in a_step(leaves=leaves, **options)._parameter_transfers() if one.bytes and len(one.group) > 1]


def of_activations(*mlps, **options) -> list[Transfer]:
    step = a_step(*mlps, **options)
    return [one for one in step._activation_transfers() if one.bytes and len(one.group) > 1]


@pytest.mark.parametrize(("remat", "gathers"), [("none", 2), ("full", 3)])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_dense_kernel_is_gathered_by_both_passes_and_its_gradient_scattered(remat, gathers, accumulation):
    runs, part = 2 * accumulation, D * D // 2  # of a device and its neighbour along `fsdp`
    assert of_parameters("dense", remat=remat, accumulation=accumulation) == [
        Transfer("all-gather", runs * gathers, part * BFLOAT16, FSDP),
        Transfer("reduce-scatter", runs, part * BFLOAT16, FSDP),
        Transfer("all-reduce", runs, part // 2 * BFLOAT16, EXPERT),
    ]


def test_what_no_axis_splits_is_added_up_over_all_tokens_in_float32():
    assert of_parameters("norm") == [Transfer("all-reduce", 2, D * FLOAT32, tuple(range(0, 16, 2)))]


@pytest.mark.parametrize(("remat", "gathers"), [("none", 1), ("full", 2)])
def test_experts_are_gathered_once_a_pass_and_added_up_in_float32(remat, gathers):
    part = D * F // 2  # of the one expert of a device, half the columns
    assert of_parameters("experts", remat=remat) == [
        Transfer("all-gather", 2 * gathers, part * BFLOAT16, FSDP),
        Transfer("reduce-scatter", 2, part * FLOAT32, FSDP),
    ]


@pytest.mark.parametrize(("tied", "gathers"), [(False, 1), (True, 2)])
def test_the_embedding_is_added_up_whole(tied, gathers):
    part, both = 264 * D // 2, tuple(sorted(a + b for a in FSDP for b in EXPERT))
    assert of_parameters("embed", tied=tied) == [
        Transfer("all-gather", gathers, part * BFLOAT16, FSDP),
        Transfer("all-reduce", 1, part * FLOAT32, both),
    ]
    assert of_parameters("head") == [
        Transfer("all-gather", 1, 264 * D * BFLOAT16, FSDP),
        Transfer("reduce-scatter", 1, 264 * D * FLOAT32, FSDP),
        Transfer("all-reduce", 1, 264 * D // 2 * FLOAT32, EXPERT),
    ]


def test_codes_travel_packed_and_have_no_gradient():
    for remat in ("none", "full"):
        assert of_parameters("codes", remat=remat) == [Transfer("all-gather", 2 * 2, D * D // 2, FSDP)]


@pytest.mark.parametrize(("remat", "sums"), [("none", 4), ("full", 5)])
def test_outputs_of_both_halves_are_added_up_over_tensor(remat, sums):
    tokens = ROWS * LENGTH // 8
    assert of_activations(FFNConfig(dim=F), remat=remat) == [
        Transfer("all-reduce", sums, tokens * D * BFLOAT16, TENSOR)
    ]


@pytest.mark.parametrize(
    ("exchange", "chip", "remat", "expected"),
    [
        ("all-to-all", "v5e", "none", [("ragged-all-to-all", 4, K)]),
        ("all-to-all", "v5e", "full", [("ragged-all-to-all", 6, K)]),
        ("all-to-all", "cpu", "none", [("all-to-all", 4, K)]),
        ("all-gather", "v5e", "none", [("all-gather", 2, 4), ("reduce-scatter", 2, 4)]),
        ("all-gather", "v5e", "full", [("all-gather", 3, 4), ("reduce-scatter", 2, 4)]),
        (None, "v5e", "none", [("ragged-all-to-all", 4, K)]),  # 4 devices, more than 2 experts of a token
    ],
)
def test_tokens_travel_to_their_experts_and_back(exchange, chip, remat, expected):
    row, layer = ROWS * LENGTH // 8 * D * BFLOAT16, moe(num_experts=E, top_k=K)
    sent = [one for one in of_activations(layer, exchange=exchange, chip=chip, remat=remat) if one.group == EXPERT]
    assert sent == [Transfer(kind, count, share * row, EXPERT) for kind, count, share in expected]


@pytest.mark.parametrize("strategy", ["synthesised", "factored-side-by-side"])
def test_tokens_travel_to_deltas_only_if_kernels_are_made_of_them(monkeypatch, strategy):
    monkeypatch.setattr(expected_step, "strategy_on", lambda *_, **__: strategy)
    layer = moe(BankConfig(kind="low-rank", rank=2), num_experts=E, top_k=K)
    sent = [one for one in of_activations(layer) if one.group == EXPERT]
    assert bool(sent) == (strategy == "synthesised")


@pytest.mark.parametrize(("sequence", "remat", "runs"), [(2, "none", 2), (2, "full", 3), (4, "none", 2)])
def test_heads_of_a_sequence_are_divided_where_they_can_be(sequence, remat, runs):
    mesh = {"data": 1, "fsdp": 1, "expert": 1, "sequence": sequence, "tensor": 1}
    width, column = 2 * ATTENTION.head_dim, ROWS * LENGTH // sequence * BFLOAT16
    found = [one for one in of_activations(FFNConfig(dim=F), mesh=mesh, remat=remat) if one.kind != "all-reduce"]
    keys, queries = ATTENTION.num_kv_heads, ATTENTION.num_heads
    if keys % sequence == 0:
        sent = Transfer("all-to-all", runs, (keys + queries) * width * column, tuple(range(sequence)))
    else:
        sent = Transfer("all-gather", runs, sequence * keys * width * column, tuple(range(sequence)))
    assert found == [sent]


@pytest.mark.parametrize(("coefficient", "first"), [(0.0, 0), (0.01, 1)])
def test_what_counts_the_loads_first_runs_forward_once_more_and_without_the_head(coefficient, first):
    layer = moe(num_experts=E, top_k=K, balance_coef=coefficient)

    def gathers(*mlps, **options) -> list[int]:
        step = a_step(*mlps, leaves=("dense", "experts", "codes", "embed", "head"), **options)
        return [one.count for one in step._parameter_transfers() if one.kind == "all-gather"]

    # Two microbatches, of two layers each: forward, backward and perhaps first.
    assert gathers(layer, accumulation=2) == [4 * (2 + first), 4 * (1 + first), 4 * (2 + first), 2 * (1 + first), 2]
    assert gathers(layer) == [4, 2, 4, 1, 1]
    tokens = ROWS * LENGTH // 8 // 2
    sums = Transfer("all-reduce", 2 * (4 + 2 * first), tokens * D * BFLOAT16, TENSOR)
    there = Transfer("ragged-all-to-all", 2 * (4 + 2 * first), tokens * K * D * BFLOAT16, EXPERT)
    assert of_activations(layer, accumulation=2) == [sums, there]
    gathered = of_activations(layer, accumulation=2, exchange="all-gather", remat="full")
    assert [(one.kind, one.count) for one in gathered] == [
        ("all-reduce", 2 * (5 + 2 * first)), ("all-gather", 2 * (3 + first)), ("reduce-scatter", 2 * (2 + first)),
    ]  # fmt: skip


def held(*leaves, kept=0, **options) -> float:
    return a_step(leaves=leaves, **options).temporaries(kept)


def test_what_a_step_holds_beside_its_arguments():
    hidden = 5.7 * BFLOAT16 * (ROWS * LENGTH // 8) * F / 2
    assert held(kept=1000) == round(1000 + hidden)
    half, part = D * D // 2, D * D // 4
    # Gradients of both layers, their kernels in bfloat16, and those gathered for one.
    assert held("dense") == round(2 * part * (FLOAT32 + BFLOAT16) + 6.3 * half * BFLOAT16 + hidden)
    assert held("codes") == round(3.0 * D * D // 2 * 2 * BFLOAT16 + hidden)
    assert held("norm") == round(2 * D * FLOAT32 * 2.42 + hidden)
    rows = ROWS * LENGTH // 8 * K * DEFAULT_CAPACITY
    layer = moe(num_experts=E, top_k=K, expert=FFNConfig(dim=F))
    assert a_step(layer).temporaries(0) == round(BFLOAT16 * (5.7 * rows * F / 2 + 14.2 * rows * D))
