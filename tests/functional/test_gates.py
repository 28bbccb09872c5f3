"""Gates against NumPy in float64: scores, selection, weights; and gates that are registered from outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.core.errors import InputError
from moe_jax.functional.routing.gates import GATES, Gate, Selection, choose, register_gate
from moe_jax.functional.routing.route import route
from moe_jax.models import FFNConfig, MoEConfig
from tests.support.numerics import normal
from tests.support.tiers import long, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

chosen_by = jax.jit(choose, static_argnames=("top_k", "gate", "scale"))


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def weights_of(gate, kept_logits, kept):
    """From the logits and scores of the chosen experts."""
    if gate in ("softmax_topk", "top1", "sigmoid_topk"):
        return kept
    if gate == "coder":
        return softmax(kept) * kept[:, :1]
    return kept / kept.sum(-1, keepdims=True)


def mixed(logits, experts):
    """The weights of SparseMixer: of each chosen expert among those near it that were not chosen before."""
    weights = np.zeros(experts.shape)
    for token, chosen in enumerate(experts):
        left = list(range(logits.shape[1]))
        for place, expert in enumerate(chosen):
            row, own = logits[token], logits[token, expert]
            near = [row[j] for j in left if (own - row[j]) / max(abs(row[j]), own) <= 0.02]
            weights[token, place] = np.exp(own) / np.exp(near).sum()
            left.remove(expert)
    return weights


@one_in(2)
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("gate", GATES)
def test_choice_and_weights(gate, top_k):
    @settings(max_examples=10)
    @given(seed=st.integers(0, 10**6), scale=st.sampled_from([1.0, 2.5]))
    def check(seed, scale):
        logits = np.random.default_rng(seed).standard_normal((7, 5)).astype(np.float32)
        if gate == "sparse_mixer":
            logits = np.float32(1) + np.float32(0.02) * logits  # some are near others, and some are not
        got = chosen_by(jnp.asarray(logits), top_k, gate, scale=scale)
        logits = logits.astype(np.float64)
        scores = 1 / (1 + np.exp(-logits)) if "sigmoid" in gate else softmax(logits)
        experts = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
        kept = np.take_along_axis(scores, experts, -1)
        np.testing.assert_array_equal(got.experts, experts)
        weights = weights_of(gate, np.take_along_axis(logits, experts, -1), kept)
        expected = scale * (mixed(logits, experts) if gate == "sparse_mixer" else weights)
        np.testing.assert_allclose(got.weights, expected, rtol=1e-5)
        total = scores.sum(-1, keepdims=True)
        np.testing.assert_allclose(got.probabilities, scores / total, rtol=1e-5)
        np.testing.assert_allclose(got.scores, kept / total, rtol=1e-5)

    check()


@pytest.mark.parametrize("group_score", ["best", "best_two"])
@pytest.mark.parametrize("gate", ["softmax_topk", "topk_sigmoid"])
def test_bias_and_groups_bound_the_choice_and_not_the_weights(gate, group_score):
    limited = jax.jit(
        lambda logits, bias: choose(logits, 3, gate, Selection(bias, groups=4, top_groups=2, group_score=group_score))
    )

    @settings(max_examples=20)
    @given(seed=st.integers(0, 10**6))
    def check(seed):
        rng = np.random.default_rng(seed)
        logits, bias = rng.standard_normal((6, 12)).astype(np.float32), rng.standard_normal(12).astype(np.float32)
        got = limited(jnp.asarray(logits), jnp.asarray(bias))
        scores = 1 / (1 + np.exp(-np.float64(logits))) if "sigmoid" in gate else softmax(np.float64(logits))
        for t in range(6):
            by_group = (scores[t] + bias).reshape(4, 3)
            count = 1 if group_score == "best" else 2
            best = np.argsort(-np.sort(by_group, axis=1)[:, -count:].sum(1))[:2]
            allowed = [3 * g + i for g in best for i in range(3)]
            experts = sorted(allowed, key=lambda e, t=t: -(scores[t] + bias)[e])[:3]
            np.testing.assert_array_equal(got.experts[t], experts)
            expected = scores[t][experts]
            expected = expected / expected.sum() if gate == "topk_sigmoid" else expected
            np.testing.assert_allclose(got.weights[t], expected, rtol=1e-5)

    check()


def test_the_bias_has_no_gradient_and_the_logits_have():
    logits = normal(0, 5, 4)

    def total(logits, bias):
        weights = choose(logits, 2, "topk_sigmoid", Selection(bias)).weights
        return jnp.sum(weights * jnp.array([[1.0, -2.0]]))

    of_logits, of_bias = jax.jit(jax.grad(total, argnums=(0, 1)))(logits, jnp.ones(4))
    assert jnp.max(jnp.abs(of_logits)) > 1e-3
    np.testing.assert_array_equal(of_bias, 0.0)


def test_auxiliary_losses_of_a_sigmoid_gate_are_of_normalised_scores():
    logits = normal(0, 16, 4)
    _, stats = jax.jit(route, static_argnums=(1, 2))(logits, 2, "topk_sigmoid")
    scores = 1 / (1 + np.exp(-np.float64(logits)))
    shares = (scores / scores.sum(-1, keepdims=True)).mean(0)
    chosen = np.argsort(-np.asarray(logits), axis=-1)[:, :2]
    load = np.bincount(chosen.ravel(), minlength=4) / chosen.size
    np.testing.assert_allclose(stats.balance, 4 * np.sum(load * shares), rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(stats.probability), 1.0, rtol=1e-5)


def test_a_token_whose_scores_are_all_zero_has_a_loss_and_gradients():
    """As of a gate that cuts scores off; every expert is then as probable."""
    cut_off = Gate(jax.nn.relu, lambda logits, scores: scores)
    logits = jnp.stack([normal(0, 4), -jnp.ones(4)])

    def balance(logits):
        return route(logits, 2, cut_off)[1].balance

    assert jnp.isfinite(balance(logits)) and jnp.isfinite(jax.grad(balance)(logits)).all()
    np.testing.assert_allclose(route(-jnp.ones((1, 4)), 2, cut_off)[1].probability, 0.25)


@long
def test_a_gate_can_be_registered_and_replaced():
    def gate(weight):
        return Gate(lambda logits: jax.nn.softmax(logits, axis=-1), lambda _, kept: jnp.full_like(kept, weight))

    with pytest.raises(InputError, match="'top1' is one of"):
        register_gate("top1", gate(0.25))
    try:
        for weight in (0.25, 0.5):  # a program with the first one is compiled anew
            register_gate("even", gate(weight))
            even_routing, _ = jax.jit(route, static_argnums=(1, 2))(jnp.zeros((3, 4)), 2, "even")
            assert even_routing.weights.tolist() == [[weight] * 2] * 3
    finally:
        del GATES["even"]


def test_a_registered_gate_can_be_named_in_a_config():
    register_gate("test-even", GATES["softmax_topk"])
    try:
        assert MoEConfig(expert=FFNConfig(dim=4), num_experts=2, top_k=1, gate="test-even").weighting == "test-even"
    finally:
        del GATES["test-even"]
