"""Learning rate, weight-decay mask and float32 moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.loading import abstract_model
from moe_jax.sharding import path_name
from moe_jax.train.optimizer import is_decayed, learning_rate, make_optimizer
from moe_jax.train.recipe import OptimizerSection, ScheduleSection
from tests.train.models import BANKS, FFN, config_of, moe

PEAK = OptimizerSection(learning_rate=1.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, *(0.2 + 0.8 * (1 + np.cos(np.pi * x)) / 2 for x in (0.25, 0.5, 0.75, 1.0))]),
    ],
)
def test_learning_rate_warms_up_and_comes_down(kind, expected):
    schedule = learning_rate(PEAK, ScheduleSection(kind=kind, warmup_steps=2, final_ratio=0.2), steps=6)
    np.testing.assert_allclose([float(schedule(done)) for done in range(6)], expected, rtol=1e-6)


def test_learning_rate_without_warm_up_starts_near_the_peak():
    schedule = learning_rate(PEAK, ScheduleSection(kind="linear", final_ratio=0.0), steps=10)
    assert float(schedule(0)) == pytest.approx(0.9)
    assert float(schedule(9)) == pytest.approx(0.0)


def test_the_learning_rate_is_never_below_zero():
    """Compiled, the last step of a decay to 0 would come out at -1e-10."""
    section = OptimizerSection(learning_rate=5e-3)
    schedule = learning_rate(section, ScheduleSection(kind="linear", warmup_steps=20, final_ratio=0.0), steps=200)
    assert float(jax.jit(schedule)(jnp.int32(199))) == 0.0


def test_norms_and_biases_are_not_decayed():
    config = config_of(moe(BANKS["low-rank"]), FFN)
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(abstract_model(config)))]
    section = OptimizerSection()
    kept = {path.split("/")[-2] for path in paths if not is_decayed(path, section)}
    assert kept == {"embed", "router", "final_norm", "attention_norm", "mlp_norm"}
    assert not is_decayed("stack/segments/0/blocks/0/mlp/experts/up/bias", section)
    assert is_decayed("lm_head/kernel", section)
    everything = OptimizerSection(decay_embeddings=True, decay_router=True)
    assert is_decayed("embed/embedding", everything)
    assert is_decayed("stack/segments/0/blocks/0/mlp/router/kernel", everything)


def test_decay_alone_shrinks_kernels_only():
    section = OptimizerSection(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(section, lambda _: 0.1)
    params = nnx.State({"final_norm": {"scale": nnx.Param(jnp.ones(3))}, "lm_head": {"kernel": nnx.Param(jnp.ones(3))}})
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["final_norm"]["scale"][...], 0.0)
    np.testing.assert_allclose(updates["lm_head"]["kernel"][...], -0.05, rtol=1e-6)


def test_moments_are_float32_for_bfloat16_parameters():
    optimizer = make_optimizer(OptimizerSection(), lambda _: 1e-3)
    params = nnx.State({"lm_head": {"kernel": nnx.Param(jnp.ones((2, 2), jnp.bfloat16))}})
    state = optimizer.init(params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 2)]
    assert len(moments) == 2 and all(leaf.dtype == jnp.float32 for leaf in moments)
    updates, _ = optimizer.update(params, state, params)
    assert updates["lm_head"]["kernel"][...].dtype == jnp.float32


def test_gradients_are_clipped_to_the_global_norm():
    params = nnx.State({"lm_head": {"kernel": nnx.Param(jnp.zeros(4))}})
    grads = jax.tree.map(lambda leaf: leaf + 100.0, params)
    moments = {}
    for clip in (0.0, 1.0):
        optimizer = make_optimizer(OptimizerSection(clip_norm=clip, weight_decay=0.0), lambda _: 1e-3)
        _, state = optimizer.update(grads, optimizer.init(params), params)
        moments[clip] = next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,))
    np.testing.assert_allclose(moments[1.0], moments[0.0] / 200.0, rtol=1e-5)
