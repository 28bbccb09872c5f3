"""A larger MoE by hand: numbers of copies, and gates with which copies give a token what their originals did."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.functional.routing.gates import Selection
from moe_jax.functional.routing.route import route
from moe_jax.models import BankConfig, MoEConfig, PerftConfig, SelectionConfig
from moe_jax.models.moe_config import AdapterConfig
from moe_jax.upcycling import UpcycleSpec, upcycled_config
from moe_jax.upcycling.copied_experts import factor_of_selection_bias, numbers_of_copies, origins, why_different
from tests.support.tiers import one_in
from tests.support.training_models import BANKS, FFN, config_of, moe

EXACT = UpcycleSpec(router_noise=0.0)
IN_GROUPS = {
    "best": SelectionConfig(bias=True, groups=4, top_groups=2),
    "best_two": SelectionConfig(bias=True, groups=3, top_groups=2, group_score="best_two"),
}
# Each gate of a family, and each way to choose; of twelve experts.
EQUAL = {
    "mixtral": dict(gate="topk_softmax", top_k=2),
    "olmoe": dict(gate="softmax_topk", top_k=3),
    "llama4": dict(gate="sigmoid_topk", top_k=2, gate_scale=0.5),
    "minimax_m2": dict(gate="topk_sigmoid", top_k=2, selection=SelectionConfig(bias=True)),
    "deepseek_v2": dict(gate="softmax_topk", top_k=3, gate_scale=16.0, selection=IN_GROUPS["best"]),
    "deepseek_v3": dict(gate="topk_sigmoid", top_k=4, gate_scale=2.5, selection=IN_GROUPS["best_two"]),
    "ernie4_5_moe": dict(gate="topk_softmax", top_k=3, selection=SelectionConfig(bias=True)),
    "switch": dict(gate="top1", top_k=1),
    "one of softmax": dict(gate="softmax_topk", top_k=1),
    "one of sigmoid": dict(gate="sigmoid_topk", top_k=1),
}


def weights_of_originals(config: MoEConfig, of: np.ndarray, seed: int, factor: float = 1.0) -> np.ndarray:
    """The weight of each of twelve original experts, for 200 tokens; copies have the logits of their originals."""
    rng = np.random.default_rng(seed)
    logits, bias = rng.normal(size=(200, 12)).astype(np.float32), rng.normal(0, 0.2, 12).astype(np.float32)
    chosen = config.selection
    selection = Selection(
        jnp.asarray(bias[of] * np.float32(factor)) if chosen.bias else None,
        chosen.groups,
        chosen.top_groups,
        chosen.group_score,
    )
    routing, _ = route(
        jnp.asarray(logits[:, of]), config.top_k, config.weighting, selection=selection, scale=config.gate_scale
    )
    found = np.zeros(logits.shape)
    for token, (experts, weights) in enumerate(zip(*map(np.asarray, routing), strict=True)):
        np.add.at(found[token], of[experts], weights)
    return found


@one_in(10)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("name", EQUAL)
def test_copies_have_together_the_weight_of_their_original(name, times):
    source = config_of(moe(num_experts=12, **EQUAL[name]))
    larger = upcycled_config(source, dataclasses.replace(EXACT, experts=12 * times))
    before, after = source.moe(0), larger.moe(0)
    assert why_different(source, larger, EXACT) is None
    grows = 1 if before.gate == "top1" else times
    assert (after.num_experts, after.top_k) == (12 * times, before.top_k * grows)
    of = origins(numbers_of_copies(None, 12, 12 * times))
    expected = weights_of_originals(before, np.arange(12), seed=times)
    factor = factor_of_selection_bias(before, after)
    np.testing.assert_allclose(weights_of_originals(after, of, times, factor), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gate", ["topk_softmax", "softmax_topk", "sigmoid_topk", "topk_sigmoid"])
def test_one_expert_may_stay_one(gate):
    source = config_of(moe(num_experts=12, top_k=1, gate=gate))
    spec = dataclasses.replace(EXACT, top_k=1)
    larger = upcycled_config(source, spec)
    assert why_different(source, larger, spec) is None and larger.moe(0).top_k == 1
    of = origins(numbers_of_copies(None, 12, 24))
    expected = weights_of_originals(source.moe(0), np.arange(12), seed=0)
    np.testing.assert_allclose(weights_of_originals(larger.moe(0), of, seed=0), expected, rtol=1e-5)


def test_a_token_has_no_more_experts_where_inputs_are_weighted():
    """An expert of twice half an input is not the expert of the whole one."""
    source = config_of(moe(num_experts=12, top_k=1, gate="sigmoid_topk", weighs_inputs=True))
    larger = upcycled_config(source, EXACT)
    assert why_different(source, larger, EXACT) is None
    assert (larger.moe(0).num_experts, larger.moe(0).top_k, larger.moe(0).gate_scale) == (24, 1, 1.0)
    spec = dataclasses.replace(EXACT, top_k=2)
    larger = upcycled_config(source, spec)
    assert "weighted inputs" in str(why_different(source, larger, spec)) and larger.moe(0).gate_scale == 1.0


@one_in(3)
@pytest.mark.parametrize("changes", [dict(top_k=2), dict(top_k=3), dict(gate="sparse_mixer")])
def test_other_choices_are_not_said_to_be_equal_and_are_not(changes):
    source = config_of(moe(num_experts=12, gate=changes.get("gate", "topk_softmax")))
    spec = dataclasses.replace(EXACT, top_k=changes.get("top_k"))
    larger = upcycled_config(source, spec)
    assert "copies of one expert" in str(why_different(source, larger, spec))
    of = origins(numbers_of_copies(None, 12, 24))
    expected = weights_of_originals(source.moe(0), np.arange(12), seed=0)
    assert np.abs(weights_of_originals(larger.moe(0), of, seed=0) - expected).max() > 0.1


def test_numbers_of_copies_make_the_largest_share_small():
    demand, total = np.array([5.0, 1.0, 0.0, 11.0]), 9
    counts = numbers_of_copies(demand, 4, total)
    splits = (split for split in itertools.product(range(1, 7), repeat=4) if sum(split) == total)
    assert max(demand / counts) == min(max(demand / np.array(split)) for split in splits)
    assert counts.tolist() == [2, 1, 1, 5]
    assert numbers_of_copies(np.zeros(3), 3, 7).tolist() == [3, 2, 2]
    assert numbers_of_copies(None, 3, 9).tolist() == [3, 3, 3]


def test_originals_come_first_and_copies_in_rounds():
    assert origins(np.array([2, 2, 2])).tolist() == [0, 1, 2, 0, 1, 2]
    assert origins(np.array([3, 1, 2])).tolist() == [0, 1, 2, 0, 2, 0]


@pytest.mark.parametrize(
    ("options", "of_moe", "message"),
    [
        (dict(experts=4), {}, "above the 4"),
        (dict(experts=6), {}, "no multiple"),
        (dict(experts=6, copies_by="use"), {}, "needs a text"),
        (dict(text="text.txt"), {}, "goes with --copies-by"),
        (dict(delta="low-rank:2", every=1), {}, "for a dense"),
        (dict(copies_by="use", text="text.txt"), dict(selection=SelectionConfig(groups=2)), "groups=2 unequal"),
        (dict(shared_from="mean"), dict(universal="one"), "shared expert already"),
        (dict(noise=0.1), dict(bank=BANKS["low-rank"]), "needs full experts"),
        (dict(shared_from="mean"), dict(bank=BANKS["low-rank"]), "needs full experts"),
        (dict(), dict(universal="coder"), "gate network"),
        (dict(), dict(merged_experts=2), "are merged"),
        (dict(), dict(perft=PerftConfig(variant="single", adapter=AdapterConfig(rank=2))), "adapters or NF4"),
        (dict(top_k=9), {}, "top_k=9 is above"),
    ],
)
def test_what_does_not_go_is_refused(options, of_moe, message):
    source = config_of(FFN, moe(**of_moe))
    with pytest.raises(InputError, match=message):
        upcycled_config(source, UpcycleSpec(**options))


@pytest.mark.parametrize("option", [dict(copies_by="use"), dict(router_noise=0.1), dict(shared_from="mean")])
def test_options_of_moes_are_none_of_dense_models(option):
    with pytest.raises(InputError, match="is for an"):
        upcycled_config(config_of(FFN), UpcycleSpec(every=1, **option))


@pytest.mark.parametrize("option", [dict(copies_by="size"), dict(router_noise=-1.0), dict(shared_from="first")])
def test_values_are_checked(option):
    with pytest.raises(InputError, match=next(iter(option))):
        UpcycleSpec(**option)


def test_an_expert_that_is_a_base_and_a_delta_becomes_two_of_one_base():
    source = moe_jax.upcycle(moe_jax.tiny_model(), experts=2, every=2, delta="low-rank:2")
    larger = moe_jax.upcycle(source, router_noise=0.0, top_k=4, step0_check=False)
    for path in source.source.specs():
        before, after = (model.source.read(path) for model in (source, larger))
        if "/delta/" in path:
            np.testing.assert_array_equal(after, np.concatenate([before, before]))
        elif path.endswith("router/kernel"):
            np.testing.assert_array_equal(after, np.concatenate([before, before], axis=1))
        else:
            np.testing.assert_array_equal(after, before)
    assert larger.config.moe(1).bank == BankConfig(kind="low-rank", rank=2)
