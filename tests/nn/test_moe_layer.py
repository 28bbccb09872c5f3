"""The MoE module in a model of one's own: any shape of activations, and its auxiliary loss."""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.experts.shapes import AdapterConfig
from moe_jax.models import FFNConfig, MoEConfig
from moe_jax.models.moe_config import PerftConfig
from moe_jax.nn.moe import MoE
from tests.support.numerics import initialised, normal

apply = nnx.jit(lambda moe, x: moe(x))


def test_the_layer_takes_activations_of_any_number_of_sequences():
    config = MoEConfig(expert=FFNConfig(dim=8), num_experts=4, top_k=2, balance_coef=0.5, z_coef=0.25, cv_coef=0.125)
    moe = initialised(lambda: MoE(config, 4, rngs=nnx.Rngs(0)))
    x = normal(0, 2, 3, 5, 4)
    whole, stats = apply(moe, x)
    for shape in ((6, 5, 4), (30, 4)):
        y, others = apply(moe, x.reshape(shape))
        assert jnp.array_equal(y.reshape(x.shape), whole) and jax.tree.all(jax.tree.map(jnp.allclose, others, stats))
    expected = 0.5 * stats[0].balance + 0.25 * stats[0].z + 0.125 * stats[0].cv
    assert jnp.allclose(moe.auxiliary_loss(stats), expected) and float(expected) > 0


def test_the_auxiliary_loss_of_a_layer_counts_the_router_of_its_adapters():
    adapter = AdapterConfig(rank=2)
    perft = PerftConfig(variant="routed", adapter=adapter, num_experts=3, top_k=1, gate="softmax_topk", z_coef=2.0)
    config = MoEConfig(expert=FFNConfig(dim=8), num_experts=4, top_k=2, balance_coef=0.0, perft=perft)
    moe = initialised(lambda: MoE(config, 4, rngs=nnx.Rngs(0)))
    _, stats = apply(moe, jnp.ones((1, 5, 4)))
    expected = perft.balance_coef * stats[1].balance + 2.0 * stats[1].z
    assert len(stats) == 2 and jnp.allclose(moe.auxiliary_loss(stats), expected) and float(expected) > 0
