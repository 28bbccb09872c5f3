"""Experts that are off, and biases of routers: by layer, in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.models import SelectionConfig
from moe_jax.nn import unstacked

IDS = np.random.default_rng(0).integers(0, 64, (2, 6))


def decoder(**options):
    expert = moe_jax.FFNConfig(dim=32)
    attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    moe = moe_jax.MoEConfig(expert=expert, num_experts=4, top_k=2, **options)
    pattern = tuple(moe_jax.LayerConfig(attention=attention, mlp=mlp) for mlp in (expert, moe))
    config = moe_jax.ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=pattern * 3)
    return moe_jax.Decoder(config, rngs=nnx.Rngs(0))


SIGMOID = {"gate": "topk_sigmoid", "selection": SelectionConfig(bias=True)}


@pytest.mark.parametrize("options", [{}, SIGMOID], ids=["softmax", "sigmoid with a bias of selection"])
def test_an_expert_that_is_off_is_the_one_whose_output_does_not_count(options):
    """What it computes changes nothing any more, and in other layers nothing was changed."""
    made = decoder(**options)
    if options:  # expert 2 would be chosen by everyone
        made.layers[3].mlp.router.selection_bias[...] = jnp.array([0.0, 0.0, 9.0, 0.0])
    off = made(IDS, experts_off={3: [2]}, routing=True)
    usual = made(IDS, routing=True)
    assert (np.asarray(usual.routing[3].experts) == 2).any() and not (np.asarray(off.routing[3].experts) == 2).any()
    np.testing.assert_array_equal(off.routing[1].experts, usual.routing[1].experts)
    assert np.isfinite(off.logits).all() and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(off.router))
    assert not np.allclose(off.logits, usual.logits, atol=1e-5)
    made.layers[3].mlp.experts[2] = jax.tree.map(jnp.ones_like, made.layers[3].mlp.experts[2].kernels())
    np.testing.assert_array_equal(made(IDS, experts_off={3: [2]}).logits, off.logits)
    np.testing.assert_allclose(unstacked(made)(IDS, experts_off={3: [2]}).logits, off.logits, atol=1e-5)


def test_biases_are_added_to_the_logits_of_their_layer():
    made, bias = decoder(), np.array([0.5, -1.0, 0.0, 2.0], np.float32)
    biased, usual = (made(IDS, routing=True, router_bias=given) for given in ({1: bias}, None))
    np.testing.assert_allclose(biased.routing[1].logits, usual.routing[1].logits + bias, atol=1e-5)
    zeros = made(IDS, router_bias={1: [0.0] * 4, 5: np.zeros(4)})
    np.testing.assert_allclose(zeros.logits, usual.logits, atol=1e-6)
    both = made(IDS, routing=True, router_bias={1: bias}, experts_off={1: [3]})
    assert not (np.asarray(both.routing[1].experts) == 3).any()
    np.testing.assert_allclose(both.routing[1].logits[..., :3], biased.routing[1].logits[..., :3], atol=1e-5)


def test_with_too_few_experts_the_others_have_no_weight():
    routing = decoder()(IDS, experts_off={1: [0, 1, 3]}, routing=True).routing[1]
    np.testing.assert_array_equal(routing.experts[..., 0], np.full((2, 6), 2))
    np.testing.assert_array_equal(routing.weights, np.broadcast_to([1.0, 0.0], (2, 6, 2)))


def test_gradients_reach_a_bias():
    graphdef, state = nnx.split(decoder())

    def loss(bias):
        return jnp.sum(nnx.merge(graphdef, state)(IDS, router_bias={3: bias}).logits ** 2)

    assert jnp.abs(jax.jit(jax.grad(loss))(jnp.zeros(4))).max() > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"experts_off": {0: [1]}}, "layer 0, which is no layer with an MoE"),
        ({"experts_off": {6: [1]}}, "layer 6"),
        ({"router_bias": {"3": [0.0] * 4}}, "router_bias names layer '3'"),
        ({"experts_off": {3: [4]}}, "experts_off[3] names 4; there are 0 to 3"),
        ({"experts_off": {3: range(4)}}, "all 4 experts"),
        ({"router_bias": {3: [0.0] * 3}}, "router_bias[3] has the shape (3,), expected (4)"),
        ({"router_bias": {3: [0] * 4}}, "router_bias[3] is of int64"),
    ],
)
def test_what_is_not_there_cannot_be_off(given, message):
    with pytest.raises(InputError) as raised:
        decoder()(IDS, **given)
    assert message in str(raised.value)
