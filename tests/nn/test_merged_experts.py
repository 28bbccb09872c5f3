"""Merged experts: fewer experts in the bank than the router has outputs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.functional.dense import ffn
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import AdapterConfig, BankConfig, FFNConfig, MoEConfig, PerftConfig, segments_of
from moe_jax.nn.moe import MoE
from moe_jax.planning.model_costs import make_plan
from moe_jax.training.flops import active_matmul_params
from tests.support.numerics import normal, randomised
from tests.support.tiers import long, one_in
from tests.support.training_models import config_of

pytestmark = pytest.mark.usefixtures("strict_numerics")

D_MODEL, EXPERTS = 8, 6
PLAIN = FFNConfig(dim=16, gated=False, activation="gelu", bias=True)
LOW_RANK = BankConfig(kind="low-rank", rank=3)
# Outputs 0, 2 and 5 of the router mean one expert: of two choices of a token both may fall into it.
GROUPS = np.array([1, 0, 1, 2, 0, 1], np.int32)


def config(bank=None, **changes) -> MoEConfig:
    options = {"expert": PLAIN, "num_experts": EXPERTS, "top_k": 3, "merged_experts": 3} | changes
    return MoEConfig(bank=bank or BankConfig(), **options)


def random_moe(moe_config: MoEConfig) -> MoE:
    moe = nnx.merge(*randomised(lambda: MoE(moe_config, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32)))
    moe.groups[...] = jnp.asarray(GROUPS)
    return moe


def reference(moe: MoE, x: jax.Array) -> jax.Array:
    """Every output of the router has an expert of its own, which some share."""
    tokens = x.reshape(-1, D_MODEL)
    logits = tokens @ moe.router.kernel[...]
    best, chosen = jax.lax.top_k(logits, moe.config.top_k)
    weights = jax.nn.softmax(best, axis=-1)
    if moe.config.universal == "med":
        weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
    bank = moe.experts
    every = [ffn(tokens, bank.kernels(g), bank.biases(g), bank.expert.activation) for g in range(bank.num_experts)]
    y = sum(
        jnp.stack([every[g] for g in GROUPS], axis=1)[jnp.arange(len(tokens)), chosen[:, i]] * weights[:, i, None]
        for i in range(moe.config.top_k)
    )
    if moe.config.extended:
        y = y + every[-1]
    return y.reshape(x.shape)


@one_in(2)
@pytest.mark.parametrize(
    "moe_config",
    [config(), config(LOW_RANK), config(LOW_RANK, universal="med", extended=True)],
    ids=["full", "low-rank", "extended"],
)
def test_choices_that_fall_into_one_expert_add_up(moe_config):
    moe = random_moe(moe_config)
    assert moe.experts.num_experts == 3 + moe_config.extended
    x = normal(2, 2, 5, D_MODEL)
    chosen = np.argsort(np.asarray(x).reshape(-1, D_MODEL) @ np.asarray(moe.router.kernel[...]), axis=1)[:, -3:]
    assert any(len(set(GROUPS[row])) < 3 for row in chosen)
    y, (stats,) = nnx.jit(lambda moe, x: moe(x))(moe, x)
    np.testing.assert_allclose(y, nnx.jit(reference)(moe, x), rtol=2e-5, atol=2e-5)
    assert stats.load.shape == (EXPERTS,)  # of the outputs of the router, not of the bank
    np.testing.assert_allclose(stats.load.sum(), 1.0, rtol=1e-6)


def test_adapters_of_perft_e_belong_to_the_outputs_of_the_router():
    adapter = AdapterConfig(rank=2, activation="silu")
    moe = random_moe(config(perft=PerftConfig(variant="embedded", adapter=adapter, num_experts=EXPERTS)))
    x = normal(2, 1, 9, D_MODEL)
    got = nnx.jit(lambda moe, x: moe(x)[0] - reference(moe, x))(moe, x)[0]

    @nnx.jit
    def expected(moe, x):
        best, chosen = jax.lax.top_k(x @ moe.router.kernel[...], 3)
        down, up = moe.perft.adapters.down[...], moe.perft.adapters.up[...]
        every = jnp.stack([jax.nn.silu(x @ down[j]) @ up[j] for j in range(EXPERTS)])
        added = every[chosen.T, jnp.arange(9)[None, :]] * jax.nn.softmax(best, axis=-1).T[:, :, None]
        return jnp.sum(added, axis=0)

    np.testing.assert_allclose(got, expected(moe, x[0]), rtol=2e-5, atol=2e-5)


@long
def test_a_mesh_does_not_change_it():
    moe = random_moe(config(num_experts=6, merged_experts=4))
    x = normal(2, 8, 5, D_MODEL)
    alone = nnx.jit(lambda moe, x: moe(x)[0])(moe, x)
    mesh = make_mesh({"expert": 4, "fsdp": 2})
    graphdef, state = nnx.split(moe)
    state = jax.device_put(state, state_shardings(state, mesh))
    with jax.set_mesh(mesh):
        many = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)[0])(state, x)
    np.testing.assert_allclose(many, alone, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("count", "message"),
    [(0, "a positive integer"), (-1, "a positive integer"), (7, "between 1 and num_experts=6")],
)
def test_numbers_of_experts_that_make_no_sense(count, message):
    with pytest.raises(InputError, match=f"merged_experts={count} must .*{message}"):
        config(merged_experts=count)


def test_the_arrays_shrink_and_everything_is_counted():
    merged = config(merged_experts=2, expert=FFNConfig(dim=32))
    plain = dataclasses.replace(merged, merged_experts=None)
    model, whole = config_of(merged, merged), config_of(plain, plain)
    specs = leaf_specs(model)
    assert specs["layers/1/mlp/groups"].shape == (EXPERTS,) and specs["layers/1/mlp/groups"].dtype == np.int32
    assert specs["layers/1/mlp/experts/up/kernel"].shape == (2, 16, 32)
    assert specs["layers/1/mlp/router/kernel"].shape == (16, EXPERTS)
    expert = 3 * 16 * 32
    plan, before = make_plan(model), make_plan(whole)
    assert before.expert_params - plan.expert_params == 2 * 4 * expert
    assert plan.router_params == before.router_params and plan.dense_params == before.dense_params
    # A token meets 3 of 6 experts, but never more than the 2 that are left; each choice is a product of its own.
    assert before.active_params - plan.active_params == 2 * expert
    assert active_matmul_params(model) == active_matmul_params(whole)
    assert len(segments_of(model.layers)) == 1  # layers with as many experts are stacked


def test_a_universal_ffn_may_be_wider_than_the_experts():
    narrow = MoEConfig(expert=FFNConfig(dim=8), num_experts=4, top_k=1, universal="coder", universal_dim=32)
    specs = leaf_specs(config_of(narrow))
    assert specs["layers/0/mlp/universal/up/kernel"].shape == (16, 32)
    assert specs["layers/0/mlp/experts/up/kernel"].shape == (4, 16, 8)
    wide = dataclasses.replace(narrow, universal_dim=None)
    one, other = active_matmul_params(config_of(narrow)), active_matmul_params(config_of(wide))
    assert one - other == 3 * 16 * (32 - 8)
    for bad, message in (({"universal": "none"}, "needs a universal FFN"), ({"universal_dim": 0}, "positive integer")):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(narrow, **bad)
