"""Balance losses of all routers while a model is tuned: they are there, they move, and they pull a router back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.models import (
    AdapterConfig,
    AttentionConfig,
    BankConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    PerftConfig,
)
from moe_jax.nn import Decoder, auxiliary_loss
from moe_jax.nn.moe import stats_per_layer
from moe_jax.peft import split_model, trainable_paths
from tests.support.numerics import made_at_once
from tests.support.tiers import one_in

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
EXPERT = FFNConfig(dim=16, gated=False)
PERFT_R = PerftConfig(
    variant="routed", adapter=AdapterConfig(rank=2), num_experts=4, top_k=1, gate="top1", balance_coef=0.5
)
MLPS = {
    "pesc": MoEConfig(
        expert=EXPERT,
        num_experts=4,
        top_k=2,
        balance_coef=0.5,
        bank=BankConfig(kind="adapter", adapter=AdapterConfig(rank=2, activation="gelu")),
    ),
    "perft-r": MoEConfig(expert=EXPERT, num_experts=4, top_k=2, balance_coef=0.01, perft=PERFT_R),
}
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16), np.int32)


def tuned_model(name):
    layers = (LayerConfig(attention=ATTENTION, mlp=MLPS[name]),) * 2
    config = ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=16, layers=layers, frozen_base=True)
    model = made_at_once(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return config, *split_model(model, trainable_paths(model))


def router_of(trained, name):
    mlp = trained["stack"]["segments"][0]["blocks"][0]["mlp"]
    return (mlp["perft"] if name == "perft-r" else mlp)["router"]["kernel"]


@one_in(2)
@pytest.mark.parametrize("name", MLPS)
def test_a_collapsed_router_is_pulled_back(name):
    """All tokens go to the first adapter of every layer; task and balance loss together spread them."""
    config, graphdef, trained, frozen = tuned_model(name)
    # What all tokens have in common decides, and it speaks for the first adapter.
    frozen["embed"]["embedding"].set_value(frozen["embed"]["embedding"][...] + 0.04)
    router = router_of(trained, name)
    router.set_value(router[...].at[:, :, 0].add(0.1))

    def outputs(trained, frozen):
        out = nnx.merge(graphdef, trained, frozen)(TOKENS)
        logits = jax.nn.log_softmax(out.logits[:, :-1])
        task = -jnp.mean(jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1))
        return task + auxiliary_loss(config, out.router), out.router

    optimizer = optax.adam(2e-3)

    @jax.jit
    def step(trained, state, frozen):
        (_, stats), grads = jax.value_and_grad(outputs, has_aux=True)(trained, frozen)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, stats, grads

    state, balances, loads = optimizer.init(trained), [], []
    for _ in range(150):
        trained, state, stats, grads = step(trained, state, frozen)
        of_layers = stats_per_layer(config, stats, of_perft=name == "perft-r")
        balances.append([float(one.balance) for one in of_layers.values()])
        loads.append(np.array([one.load for one in of_layers.values()]))
        if len(balances) == 1:
            assert float(jnp.max(jnp.abs(router_of(grads, name)[...]))) > 1e-4
    top_k = 2 if name == "pesc" else 1
    np.testing.assert_allclose(loads[0][:, 0], 1 / top_k)
    assert np.min(balances[0]) > 1.2, balances[0]
    assert np.max(balances[-1]) < 1.1, balances[-1]
    assert np.max(np.mean(loads[-30:], axis=0)) < 0.4


def test_every_router_has_a_loss_of_its_own():
    """The frozen MoE's router keeps its loss, whose gradient reaches what comes before it; PERFT's adds its own."""
    config, graphdef, trained, frozen = tuned_model("perft-r")

    def base_loss(trained, frozen):
        stats = nnx.merge(graphdef, trained, frozen)(TOKENS).router
        return sum(one.balance for one in stats_per_layer(config, stats).values()), stats

    up = trained["stack"]["segments"][0]["blocks"][0]["mlp"]["perft"]["adapters"]["up"]
    up.set_value(jnp.asarray(np.random.default_rng(1).standard_normal(up[...].shape), jnp.float32))
    gradient, router = jax.jit(jax.grad(base_loss, has_aux=True))(trained, frozen)
    base, own = (stats_per_layer(config, router, of_perft=of_perft) for of_perft in (False, True))
    expected = sum(0.01 * float(stats.balance) for stats in base.values())
    expected += sum(0.5 * float(stats.balance) for stats in own.values())
    np.testing.assert_allclose(float(auxiliary_loss(config, router)), expected, rtol=1e-6)
    first_layer = gradient["stack"]["segments"][0]["blocks"][0]["mlp"]["perft"]["adapters"]["up"][0]
    assert float(jnp.max(jnp.abs(first_layer))) > 1e-5
