"""The capacity of several rows together, padding included, against a loop; and of training alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.token_choices import NO_EXPERT
from moe_jax.models import config_from_json, config_to_json
from moe_jax.nn import MoE
from tests.support.tiers import examples
from tests.support.training_models import config_of, moe

jitted_route = jax.jit(route, static_argnames=("top_k", "gate", "capacity_factor", "num_sequences", "pads_capacity"))
E, SIZE = 4, 12


def reference(experts, factor, num_groups):
    """Which assignments fit, one after the other: all first choices of a group, then all second ones."""
    kept, size = np.zeros(experts.shape, bool), len(experts) // num_groups
    for start in range(0, len(experts), size):
        taken, capacity = np.zeros(E, int), int(np.ceil(size / E * (factor * experts.shape[1])))
        for choice in range(experts.shape[1]):
            for token in range(start, start + size):
                kept[token, choice] = taken[experts[token, choice]] < capacity
                taken[experts[token, choice]] += 1
    return kept


@settings(max_examples=examples(12))
@given(st.sampled_from([0.25, 1.0, 1.5]), st.integers(1, 3), st.integers(1, 2), st.integers(0, 999))
def test_first_choices_and_padding_take_room(factor, groups, top_k, seed):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(groups * SIZE, E)) + [2.0, 1, 0, 0], jnp.float32)
    valid = rng.random(groups * SIZE) < 0.7
    gate = "topk_softmax" if top_k == 2 else "softmax_topk"
    free, _ = jitted_route(logits, top_k, gate)
    routing, stats = jitted_route(
        logits, top_k, gate, valid=jnp.asarray(valid), capacity_factor=factor, num_sequences=groups, pads_capacity=True
    )
    fits = reference(np.asarray(free.experts), factor, groups)
    kept = fits & valid[:, None]
    np.testing.assert_array_equal(routing.experts, np.where(kept, free.experts, NO_EXPERT))
    np.testing.assert_allclose(stats.dropped, 1 - kept.sum() / max(1, valid.sum() * top_k), atol=1e-6)
    if top_k == 1:
        np.testing.assert_array_equal(routing.weights, np.where(kept, free.weights, 0))
    else:  # a token's weights sum to 1 as long as it keeps an expert
        total = np.asarray(routing.weights).sum(axis=1)
        np.testing.assert_allclose(total, kept.any(axis=1), atol=1e-6)
        both = kept.all(axis=1)
        np.testing.assert_allclose(np.asarray(routing.weights)[both], np.asarray(free.weights)[both], atol=1e-6)


called = nnx.jit(lambda layer, x, key=None: layer(x, key=key))


def layer(**options) -> MoE:
    return MoE(moe(capacity_factor=0.5, **options), 16, rngs=nnx.Rngs(0))


def test_it_is_of_training_alone_and_of_rows_that_it_divides():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 16)), jnp.float32)
    limited, free = layer(capacity_rows=2), MoE(moe(), 16, rngs=nnx.Rngs(0))
    y, (stats,) = called(limited, x)
    np.testing.assert_array_equal(y, called(free, x)[0])
    assert float(stats.dropped) == 0
    key = jax.random.key(0)
    together, (stats,) = called(limited, x, key)
    assert float(stats.dropped) > 0.1
    # A row depends on those that it stands with, and on no others.
    alone = called(limited, x[:2], key)[0]
    np.testing.assert_allclose(together[:2], alone, atol=1e-6)
    with pytest.raises(InputError, match="capacity_rows=2"):
        called(limited, x[:3], key)


def test_gradients_reach_the_router_through_the_weights_that_are_left():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)

    def loss(layer):
        return jnp.sum(jnp.sin(layer(x, key=jax.random.key(0))[0]))

    gradient = nnx.jit(nnx.grad(loss))(layer(capacity_rows=2)).router.kernel[...]
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-4


def test_it_is_a_part_of_the_config_and_needs_a_factor():
    config = config_of(moe(capacity_factor=1.5, capacity_rows=8))
    assert config_from_json(config_to_json(config)) == config
    written = config_to_json(config_of(moe(capacity_factor=1.5)))["segments"][0]["pattern"][0]["moe"]
    assert "capacity_rows" not in written
    with pytest.raises(InputError, match="capacity_rows"):
        moe(capacity_rows=8)
    with pytest.raises(InputError, match="capacity_rows"):
        dataclasses.replace(config.layers[0].mlp, capacity_rows=0)
    spec = moe_jax.UpcycleSpec(experts=4, every=1, capacity_factor=1.5, capacity_rows=8)
    upcycled = moe_jax.upcycle(moe_jax.tiny_model(), None, spec)
    assert (upcycled.config.moe(0).capacity_factor, upcycled.config.moe(0).capacity_rows) == (1.5, 8)
    assert upcycled.lineage[-1]["options"]["capacity_rows"] == 8
