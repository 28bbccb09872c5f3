"""Routing and its auxiliary losses (methods.md 1)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.core.errors import InputError
from moe_jax.functional.routing.gates import Selection
from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.token_choices import NO_EXPERT
from moe_jax.functional.token_dispatch import sort_by_expert
from tests.support.numerics import normal
from tests.support.tiers import examples

# What is said of losses here is said of them all; the others are in `test_gates`.
SOFTMAX_GATES = ("softmax_topk", "topk_softmax", "top1", "coder")

pytestmark = pytest.mark.usefixtures("strict_numerics")


jitted_route = jax.jit(route, static_argnames=("top_k", "gate", "capacity_factor", "num_sequences"))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([(1, 1, 1), (9, 8, 1), (9, 8, 3), (5, 4, 4)]),
    st.sampled_from(SOFTMAX_GATES[:3]),
    st.integers(0, 10**6),
)
def test_weights_are_those_of_the_gate(shape, gate, seed):
    tokens, num_experts, top_k = shape
    top_k = 1 if gate == "top1" else top_k
    logits = np.random.default_rng(seed).standard_normal((tokens, num_experts)).astype(np.float32)
    routing, stats = jitted_route(jnp.asarray(logits), top_k, gate)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    expected_experts = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    expected = np.take_along_axis(p, expected_experts, -1)
    if gate == "topk_softmax":
        expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_array_equal(routing.experts, expected_experts)
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-5)
    counts = np.bincount(expected_experts.ravel(), minlength=num_experts) / (tokens * top_k)
    np.testing.assert_allclose(stats.load, counts, rtol=1e-6)
    np.testing.assert_allclose(stats.balance, num_experts * np.sum(counts * p.mean(0)), rtol=1e-5)
    np.testing.assert_allclose(stats.z, np.mean(np.log(np.exp(logits).sum(-1)) ** 2), rtol=1e-4, atol=1e-6)
    assert stats.dropped == 0


def test_uniform_routing_scores_one():
    # Token t prefers experts t and t+1 (mod E) a little: every expert gets the same share.
    num_experts, top_k = 8, 2
    tokens = jnp.arange(64)[:, None]
    distance = jnp.mod(jnp.arange(num_experts)[None, :] - tokens, num_experts)
    logits = jnp.where(distance < top_k, 1e-4, 0.0).astype(jnp.float32)
    _, stats = jitted_route(logits, top_k, "topk_softmax")
    np.testing.assert_allclose(stats.balance, 1.0, rtol=1e-4)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_collapse_onto_k_experts_scores_e_over_k(top_k):
    logits = jnp.where(jnp.arange(8)[None, :] < top_k, 30.0, -30.0) * jnp.ones((16, 1))
    _, stats = jitted_route(logits.astype(jnp.float32), top_k, "softmax_topk")
    np.testing.assert_allclose(stats.balance, 8 / top_k, rtol=1e-5)


def test_balance_gradient_pushes_towards_balance():
    logits = normal(0, 64, 4) + jnp.array([[2.0, 0.0, 0.0, 0.0]])
    gradient = jax.jit(jax.grad(lambda x: route(x, 2, "topk_softmax")[1].balance))(logits)
    assert jnp.all(jnp.isfinite(gradient))
    # Descending lowers the logit of the overloaded expert on average and raises the others'.
    assert jnp.mean(gradient, axis=0)[0] > 1e-4
    assert jnp.all(jnp.mean(gradient, axis=0)[1:] < 0)


def test_descending_the_balance_loss_recovers_a_collapsed_router():
    x = normal(1, 128, 16).at[:, 0].set(1.0)
    kernel = (0.02 * normal(0, 16, 4)).at[0, 0].add(3.0)

    @jax.jit
    def balance(kernel):
        return route(x @ kernel, 1, "topk_softmax")[1].balance

    start = balance(kernel)
    step = jax.jit(lambda kernel: kernel - 1.0 * jax.grad(balance)(kernel))
    for _ in range(100):
        kernel = step(kernel)
    assert start > 3.0
    assert balance(kernel) < 1.3


@pytest.mark.parametrize("gate", SOFTMAX_GATES)
def test_variation_of_uniform_routing_is_zero(gate):
    # Token t prefers expert t (mod E): every expert has the same importance and load.
    logits = 2.0 * jnp.tile(jnp.eye(4), (5, 1))
    np.testing.assert_allclose(jitted_route(logits, 1, gate)[1].cv, 0.0, atol=1e-6)
    assert jitted_route(jnp.ones((3, 1)), 1, gate)[1].cv == 0.0


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_variation_when_collapsed_onto_k_experts(top_k):
    logits = jnp.where(jnp.arange(8)[None, :] < top_k, 30.0, -30.0) * jnp.ones((16, 1))
    _, stats = jitted_route(logits.astype(jnp.float32), top_k, "softmax_topk")
    share = np.array([8 / top_k] * top_k + [0.0] * (8 - top_k))
    np.testing.assert_allclose(stats.cv, 2 * share.var(ddof=1), rtol=1e-5)


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 4]), st.sampled_from(SOFTMAX_GATES), st.integers(0, 10**6))
def test_variation_is_that_of_importance_and_load(top_k, gate, seed):
    top_k = 1 if gate == "top1" else top_k
    rng = np.random.default_rng(seed)
    logits, valid = rng.standard_normal((16, 4)).astype(np.float32), rng.random(16) < 0.7
    _, stats = jitted_route(jnp.asarray(logits), top_k, gate, valid=jnp.asarray(valid))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    chosen = p >= -np.sort(-p, axis=-1)[:, top_k - 1 : top_k]
    importance, load = (p * chosen)[valid].sum(0), chosen[valid].sum(0)
    expected = sum(x.var(ddof=1) / x.mean() ** 2 if x.sum() else 0.0 for x in (importance, load))
    np.testing.assert_allclose(stats.cv, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gate", SOFTMAX_GATES)
def test_variation_has_a_gradient_that_pushes_towards_balance(gate):
    """Also with one expert per token, whose renormalised weight is 1 whatever the router says."""
    logits = normal(0, 64, 4) + jnp.array([[2.0, 0.0, 0.0, 0.0]])
    gradient = jax.jit(jax.grad(lambda x: route(x, 1, gate)[1].cv))(logits)
    assert jnp.all(jnp.isfinite(gradient))
    assert jnp.mean(gradient, axis=0)[0] > 1e-4


def test_padding_does_not_count():
    logits = normal(0, 12, 4)
    valid = jnp.arange(12) < 7
    _, padded = jitted_route(logits, 2, "topk_softmax", valid=valid)
    _, cut = jitted_route(logits[:7], 2, "topk_softmax")
    chex.assert_trees_all_close(padded, cut, rtol=1e-5)


def test_what_padding_holds_reaches_no_statistic():
    logits = normal(0, 12, 4)
    valid = jnp.arange(12) < 7
    clean = jitted_route(logits, 2, "topk_softmax", valid=valid)
    for wild in (jnp.nan, 1e25):
        soiled = jnp.where(valid[:, None], logits, wild)
        chex.assert_trees_all_equal(jitted_route(soiled, 2, "topk_softmax", valid=valid), clean)


def capacity_reference(experts, valid, num_experts, factor, num_sequences):
    """Which assignments are kept, one after the other."""
    (tokens, top_k), kept = experts.shape, np.zeros(experts.shape, bool)
    length = tokens // num_sequences
    for start in range(0, tokens, length):
        taken = np.zeros(num_experts, int)
        capacity = int(np.ceil(factor * valid[start : start + length].sum() * top_k / num_experts))
        for t in range(start, start + length):
            for j in range(top_k if valid[t] else 0):
                kept[t, j] = taken[experts[t, j]] < capacity
                taken[experts[t, j]] += 1
    return kept


@settings(max_examples=examples(20))
@given(
    st.sampled_from([0.25, 1.0, 1.2, 2.0]),
    st.sampled_from([(1, 16), (3, 8)]),
    st.sampled_from([1, 2]),
    st.integers(0, 999),
)
def test_capacity_keeps_earlier_tokens_of_a_sequence(factor, shape, top_k, seed):
    num_sequences, num_experts, tokens = shape[0], 4, shape[0] * shape[1]
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.standard_normal((tokens, num_experts)) + [3.0, 0, 0, 0], jnp.float32)
    valid = rng.random(tokens) < 0.7
    free, _ = jitted_route(logits, top_k, "topk_softmax")
    routing, stats = jitted_route(
        logits, top_k, "topk_softmax", valid=jnp.asarray(valid), capacity_factor=factor, num_sequences=num_sequences
    )
    kept = capacity_reference(np.asarray(free.experts), valid, num_experts, factor, num_sequences)
    np.testing.assert_array_equal(routing.experts, np.where(kept, free.experts, NO_EXPERT))
    np.testing.assert_array_equal(routing.weights, np.where(kept, free.weights, 0))
    np.testing.assert_allclose(stats.dropped, 1 - kept.sum() / max(1, valid.sum() * top_k), atol=1e-6)


def test_padding_before_a_text_takes_no_capacity():
    """Four tokens, two for either expert, after four of padding: there is room for two in each."""
    logits = jnp.tile(jnp.eye(2), (4, 1))
    valid = jnp.arange(8) >= 4
    routing, stats = jitted_route(logits, 1, "topk_softmax", valid=valid, capacity_factor=1.0)
    np.testing.assert_array_equal(routing.experts[:, 0], [NO_EXPERT] * 4 + [0, 1, 0, 1])
    np.testing.assert_array_equal(routing.weights[:, 0], [0.0] * 4 + [1.0] * 4)
    assert stats.dropped == 0


@pytest.mark.parametrize("factor", [None, 0.5])
def test_what_no_expert_sees_is_in_no_group(factor):
    """Not even multiplied: the rows of a group are those of kept assignments."""
    logits = normal(0, 12, 4) + jnp.array([[2.0, 0, 0, 0]])
    valid = jnp.arange(12) % 3 > 0
    routing, stats = jitted_route(logits, 2, "topk_softmax", valid=valid, capacity_factor=factor)
    kept = round(float((1 - stats.dropped) * 8 * 2))
    assert jnp.sum(sort_by_expert(routing.experts, 4).group_sizes) == kept
    assert kept == 16 if factor is None else kept < 16


LOGITS = jnp.zeros((4, 3))


@pytest.mark.parametrize(
    ("logits", "top_k", "options", "complaint"),
    [
        (LOGITS[0], 2, {}, r"shape \(3,\), expected \(any, any\)"),
        (LOGITS[None], 2, {}, r"shape \(1, 4, 3\)"),
        (LOGITS.astype(jnp.bfloat16), 2, {}, "bfloat16, expected float32"),
        (LOGITS, 4, {}, "top_k=4 must lie between 1 and .* experts, 3"),
        (LOGITS, 0, {}, "top_k=0"),
        (LOGITS, 2, {"selection": Selection(bias=jnp.zeros(2))}, r"shape \(2,\), expected \(3\)"),
        (LOGITS, 2, {"selection": Selection(groups=2)}, "groups=2 must divide"),
        (LOGITS, 2, {"selection": Selection(groups=3)}, "from top_groups=1"),
        (LOGITS, 2, {"num_sequences": 3, "capacity_factor": 1.0}, "num_sequences=3 must divide"),
        (LOGITS, 2, {"sequences": 3}, "sequences=3 must divide"),
        (LOGITS, 2, {"sequences": jnp.zeros((2, 3), jnp.int32)}, r"expected one entry"),
        (LOGITS, 2, {"sequences": jnp.zeros(4, jnp.int32)}, r"expected \(any, any\)"),
        (LOGITS, 2, {"valid": jnp.ones((3,), bool)}, r"shape \(3,\), expected \(4\)"),
        (LOGITS, 2, {"capacity_factor": -1.0}, "finite number above"),
        (LOGITS, 2, {"capacity_factor": float("nan")}, "finite number above"),
        (LOGITS, 2, {"balance_choices": "frist"}, "balance_choices 'frist'"),
        (LOGITS, 2, {"selection": Selection(groups=3, top_groups=2, group_score="best_two")}, "needs two"),
        (LOGITS, 2, {"selection": Selection(group_score="beest")}, "group_score 'beest'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_when_they_are_traced_too(logits, top_k, options, complaint):
    for function in (route, lambda *given, **more: jax.jit(lambda logits: route(logits, *given[1:], **more))(given[0])):
        with pytest.raises(InputError, match=complaint):
            function(logits, top_k, "topk_softmax", **options)


def test_a_list_is_no_array():
    with pytest.raises(InputError, match="expected an array"):
        route([[0.0, 1.0]], 1, "top1")
