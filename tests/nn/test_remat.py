"""What the backward pass computes once more, for every way of making a product with a kernel."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts import set_strategy
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Decoder
from tests.support.jaxprs import equations
from tests.support.numerics import assert_close
from tests.support.tiers import long, one_in

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
FFN = FFNConfig(dim=16)
TOKENS = np.random.default_rng(0).integers(0, 50, (8, 4), np.int32)


def moe(**bank):
    return MoEConfig(expert=FFN, num_experts=4, top_k=2, bank=BankConfig(**bank))


# What is applied, how, and by which primitive its products are known in a traced program.
PRODUCTS = {
    "grouped": (moe(), "auto", "ragged_dot_general"),
    "synthesised": (moe(kind="low-rank", rank=2), "synthesised", "while"),
    "thin grouped": (moe(kind="low-rank", rank=2), "factored-grouped", "ragged_dot_general"),
    "entrywise": (moe(kind="sparse", rate=0.9), "factored-entrywise", "while"),
    "NF4": (FFNConfig(dim=16, nf4=True), "auto", "custom_vjp_call"),
}


def gradient(name, remat, drawn=True):
    """The gradient of two scanned layers, and the parameters, or what they are like."""
    mlp, strategy, _ = PRODUCTS[name]
    layers = (LayerConfig(attention=ATTENTION, mlp=mlp),) * 2
    config = ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=32, layers=layers)

    def make():
        model = Decoder(config, rngs=nnx.Rngs(0), remat=remat)
        set_strategy(model, strategy)
        return model

    graphdef, params, rest = nnx.split(make() if drawn else nnx.eval_shape(make), nnx.Param, ...)

    def loss(params):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, params, rest)(TOKENS).logits))

    return jax.grad(loss), params


def count(name, remat):
    """How many products the backward pass and what it repeats of the forward pass have."""
    program, params = gradient(name, remat, drawn=False)
    found = Counter(equation.primitive.name for equation in equations(jax.make_jaxpr(program)(params)))
    return found[PRODUCTS[name][2]]


@one_in(6)
@pytest.mark.parametrize("name", PRODUCTS)
def test_dots_multiplies_nothing_with_a_kernel_again(name):
    assert count(name, "none") == count(name, "dots") < count(name, "full")


@long
def test_dots_saves_what_is_multiplied_over_a_mesh():
    with jax.set_mesh(make_mesh({"data": 2, "expert": 2, "tensor": 2})):
        assert count("grouped", "none") == count("grouped", "dots") < count("grouped", "full")


@long
def test_gradients_do_not_depend_on_what_is_saved():
    expected, got = (jax.jit(program)(params) for program, params in (gradient("grouped", r) for r in ("none", "dots")))
    assert_close(got, expected)
