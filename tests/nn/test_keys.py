"""The random key of a forward pass: none at evaluation, every layer its own, however layers are stacked."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.distributed.sharding import path_name
from moe_jax.functional.keys import fold_in
from moe_jax.model_io.loading import disk_paths, model_leaves
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Decoder
from moe_jax.nn.moe import stats_per_layer
from tests.support.numerics import initialised
from tests.support.tiers import long, one_in

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
FFN = LayerConfig(attention=ATTENTION, mlp=FFNConfig(dim=16))
CODER = MoEConfig(expert=FFNConfig(dim=16), num_experts=4, top_k=1, universal="coder")
MOE = LayerConfig(attention=ATTENTION, mlp=CODER)
TOKENS = np.random.default_rng(0).integers(0, 50, (4, 12), np.int32)


def decoder(*layers, seed=0, **options) -> Decoder:
    config = ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=32, layers=layers)
    return initialised(lambda: Decoder(config, rngs=nnx.Rngs(0), **options), seed)


def with_leaves(model: Decoder, change) -> Decoder:
    """The model with every leaf replaced by `change(name on disk, leaf)`, for leaves that stand for one layer."""
    graphdef, state = nnx.split(model)
    replaced = jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(disk_paths(model.config, path_name(path)), leaf), state
    )
    return nnx.merge(graphdef, replaced)


@nnx.jit
def apply(model, key):
    return model(TOKENS, key=key)


def logits_of(model, key):
    return apply(model, key).logits


# A capacity so large that nothing is dropped makes of a layer a different description of the same thing.
OTHER = dataclasses.replace(MOE, mlp=dataclasses.replace(CODER, capacity_factor=1e6))


@one_in(2, first=1)
@pytest.mark.parametrize("layers", [(MOE, MOE, MOE), (MOE, OTHER, MOE, OTHER)], ids=["stacked", "blocks of a repeat"])
@long
def test_every_layer_draws_differently(layers):
    """Equal layers that leave their input as it is: without noise their routers do the same."""
    model = decoder(*layers)
    assert [segment.repeats for segment in model.stack.segments] == [len(layers) // len(set(layers))]
    first = dict(model_leaves(decoder(MOE)))

    def equal_and_idle(paths, leaf):
        if paths[0].startswith("layers/"):
            leaf = np.broadcast_to(first[f"layers/0/{paths[0].split('/', 2)[2]}"], leaf.shape)
        return leaf * 0 if "/attention/o/" in paths[0] or "/down/" in paths[0] else leaf

    model = with_leaves(model, equal_and_idle)

    @nnx.jit
    def of_layers(model, key):
        return [stats.z for stats in stats_per_layer(model.config, model(TOKENS, key=key).router).values()]

    def z_of_layers(key):
        return [float(z) for z in of_layers(model, key)]

    calm, noisy = z_of_layers(None), z_of_layers(jax.random.key(0))
    np.testing.assert_allclose(calm, calm[0], rtol=1e-5)
    assert np.diff(sorted(noisy)).min() > 1e-3
    # Without a key there is no randomness, and with one what is drawn depends on it alone.
    assert z_of_layers(None) == calm and z_of_layers(jax.random.key(0)) == noisy
    assert np.abs(np.subtract(noisy, calm)).min() > 1e-4
    assert np.abs(np.subtract(z_of_layers(jax.random.key(1)), noisy)).min() > 1e-4


@long
def test_layers_in_a_scan_equal_layers_one_by_one_and_draw_the_same_noise(strict_numerics):
    """The same parameters, cut into segments differently, give the same logits."""
    scanned = decoder(*[FFN, MOE] * 2)
    cut = decoder(FFN, MOE, FFN, OTHER, seed=1)
    assert [s.repeats for s in scanned.stack.segments] == [2]
    assert [s.repeats for s in cut.stack.segments] == [1, 1, 1, 1]
    leaves = dict(model_leaves(scanned))
    assert leaves.keys() == dict(model_leaves(cut)).keys()
    cut = with_leaves(cut, lambda paths, leaf: leaves[paths[0]].reshape(leaf.shape))
    key = jax.random.key(3)
    np.testing.assert_allclose(logits_of(cut, key), logits_of(scanned, key), atol=1e-5)


@long
def test_rematerialisation_draws_the_same_noise_again():
    def gradient(remat):
        graphdef, state = nnx.split(decoder(MOE, MOE, remat=remat))
        key = jax.random.key(0)
        return jax.jit(jax.grad(lambda s: jnp.mean(nnx.merge(graphdef, s)(TOKENS, key=key).logits ** 2)))(state)

    chex.assert_trees_all_close(gradient("full"), gradient("none"), rtol=1e-7, atol=1e-6)


def test_folding_nothing_is_nothing():
    assert fold_in(None, 3) is None
    key = jax.random.key(0)
    assert fold_in(key, 3) == jax.random.fold_in(key, 3) != fold_in(key, 4)
