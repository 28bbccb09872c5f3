"""Latent attention: both of its ways, its cache, and it over a mesh. What it computes is compared in `families`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.experts import FFNConfig, LoRAConfig
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import AttentionConfig, LatentConfig, LayerConfig, ModelConfig, config_from_json, config_to_json
from moe_jax.nn import Decoder, init_cache
from moe_jax.nn.attention import LatentAttention, LatentCache
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.spec import AdaptSpec
from moe_jax.training.flops import active_matmul_params
from tests.support.numerics import made_at_once
from tests.support.tiers import long, one_in

LATENT = LatentConfig(kv_rank=16, rope_dim=4, value_dim=8, q_rank=12)
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=12, latent=LATENT, biases=("q_down", "kv_down", "o"))
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 9)).astype(np.int32)


def model_config(**changes):
    attention = dataclasses.replace(ATTENTION, **changes)
    # The second layer makes queries of the activations, and sees a window.
    other = dataclasses.replace(attention, latent=dataclasses.replace(LATENT, q_rank=None), biases=(), sliding_window=5)
    layers = tuple(LayerConfig(attention=one, mlp=FFNConfig(dim=32)) for one in (attention, other))
    return ModelConfig(family="deepseek_v3", vocab_size=64, d_model=32, max_positions=32, layers=layers)


def random_model(config):
    """A model of large random parameters; integers, codes of NF4 kernels, stay as they are drawn."""
    graphdef, state = nnx.split(made_at_once(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)

    def draw(path, array):
        name = jax.tree_util.keystr(path)
        if array.dtype != jnp.float32 or "nf4" in name:
            return array
        return jnp.asarray(0.3 * rng.normal(size=array.shape) + ("norm" in name), jnp.float32)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, state))


def lora(*targets):
    return LoRAConfig(rank=2, targets=targets, scale=0.5)


@one_in(6)
@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("tuned", [False, True], ids=["plain", "qlora"])
def test_a_cache_of_latents_gives_what_is_computed_without(strict_numerics, monkeypatch, tuned, absorbed):
    config = model_config(biases=())
    if tuned:
        options = AdaptSpec(method="lora", adapter="lora:2", targets=("q", "q_up", "kv_down", "kv_up"), base="nf4")
        config = adapted_config(config, options)
    model = random_model(config)
    apply = nnx.jit(lambda model, tokens, **options: model(tokens, **options))
    expected = apply(model, jnp.asarray(TOKENS)).logits
    monkeypatch.setattr(LatentAttention, "_is_cheaper_absorbed", lambda self, queries, slots: absorbed)
    caches = init_cache(config, len(TOKENS), 11, jnp.dtype("float32"))
    for first, last in ((0, 4), (4, 8), (8, 9)):
        positions = jnp.broadcast_to(jnp.arange(first, last, dtype=jnp.int32), (len(TOKENS), last - first))
        out = apply(model, jnp.asarray(TOKENS[:, first:last]), positions=positions, caches=caches)
        caches = out.caches
        np.testing.assert_allclose(out.logits, expected[:, first:last], atol=2e-5 * float(jnp.abs(expected).max()))


def test_a_token_takes_a_latent_and_one_key():
    ((cache,), _) = init_cache(model_config(), 2, 7, jnp.dtype("bfloat16"))
    assert isinstance(cache, LatentCache)
    assert (cache.latent.shape, cache.key.shape) == ((1, 2, 7, 16), (1, 2, 7, 4))


def test_latents_are_attended_to_where_that_is_cheaper():
    # Widths of DeepSeek-V3.
    latent = LatentConfig(kv_rank=512, rope_dim=64, value_dim=128)
    config = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=192, latent=latent)
    layer = LayerConfig(attention=config, mlp=FFNConfig(dim=8))
    model = ModelConfig(family="x", vocab_size=8, d_model=8, max_positions=8, layers=(layer,))
    attention = nnx.eval_shape(lambda: LatentAttention(config, model, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")))
    assert [attention._is_cheaper_absorbed(queries, 4096) for queries in (1, 64, 1024)] == [True, True, False]


# With one row for each device of the last one, kernels whose inputs are whole must not be split by their rows.
@long
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_mesh_and_rematerialisation_change_nothing(axes):
    config = dataclasses.replace(model_config(lora=lora("kv_up", "kv_down", "o")), frozen_base=True)
    graphdef, state = nnx.split(random_model(config))
    again = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), remat="full")))

    def loss(state, graphdef):
        return jnp.mean(jnp.square(nnx.merge(graphdef, state)(jnp.asarray(TOKENS)).logits))

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = step(state, graphdef)
    mesh = make_mesh(axes, jax.devices()[: math.prod(axes.values())])
    with jax.sharding.set_mesh(mesh):
        split = jax.device_put(state, state_shardings(state, mesh))
        # A latent is whole on every device, heads are split.
        specs = {path: leaf.sharding.spec for path, leaf in nnx.to_flat_state(split)}
        at = ("stack", "segments", 0, "blocks", 0, "attention")
        assert specs[(*at, "kv_down", "kernel")] == P(None, "fsdp", "tensor")
        assert specs[(*at, "kv_up", "kernel")] == P(None, "fsdp", "tensor")
        got = step(split, again)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1e-3, float(jnp.abs(b).max())), err_msg=str(path))


def test_it_is_written_and_counted():
    config = model_config()
    assert config_from_json(config_to_json(config)) == config
    specs = leaf_specs(config)
    kernels = {path: spec.shape for path, spec in specs.items() if "/attention/" in path and path.endswith("kernel")}
    assert kernels["layers/0/attention/kv_up/kernel"] == (16, 4 * (8 + 8))
    counted = sum(a * b for a, b in kernels.values()) + 2 * 3 * 32 * 32 + 32 * 64
    assert active_matmul_params(config) == counted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2 must be num_heads=4"),
        ({"head_dim": 4}, "rope_dim=4 must be below head_dim=4"),
        ({"qk_norm": "head"}, "latent .* no qk_norm, clip_qkv"),
        ({"sinks": True}, "latent attention has no"),
        ({"biases": ("q_up",)}, "q_down, kv_down, o .* not q_up"),
        ({"biases": ("q",)}, "unknown bias 'q'"),
        ({"lora": lora("q", "k")}, "LoRA targets .* are q_down, q_up, kv_down, kv_up, o"),
    ],
)
def test_what_does_not_go_together(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(ATTENTION, **changes)


def test_targets_are_named_by_what_a_model_has():
    with pytest.raises(InputError, match="k .* has q_down, q_up, kv_down, kv_up, o, q, gate"):
        adapted_config(model_config(), AdaptSpec(method="lora", adapter="lora:2", targets=("k",)))


def test_a_rotated_width_is_even():
    with pytest.raises(InputError, match="rope_dim=3 must be even"):
        LatentConfig(kv_rank=4, rope_dim=3, value_dim=4)


@pytest.mark.parametrize("widths", [(512, 64, 128, 128), (16, 4, 8, 12), (7, 4, 40, 5)], ids=str)
def test_what_is_cheaper_is_counted_in_multiplications(widths):
    rank, rotated, value, plain = widths
    latent = LatentConfig(kv_rank=rank, rope_dim=rotated, value_dim=value)
    config = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=plain + rotated, latent=latent)
    layer = LayerConfig(attention=config, mlp=FFNConfig(dim=8))
    model = ModelConfig(family="x", vocab_size=8, d_model=8, max_positions=8, layers=(layer,))
    attention = nnx.eval_shape(lambda: LatentAttention(config, model, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")))
    found = set()
    for slots in (1, 8, 100, 4096):
        for queries in range(1, 400, 7):
            # Keys and values of every slot are made; queries meet keys, and weights meet values.
            of_heads = slots * rank * (plain + value) + queries * slots * ((plain + rotated) + value)
            # Queries and results are turned; the former meet latents and the rotated part, weights meet latents.
            of_latents = queries * (plain * rank + rank * value) + queries * slots * ((rank + rotated) + rank)
            assert attention._is_cheaper_absorbed(queries, slots) == (of_latents < of_heads)
            found.add(of_latents < of_heads)
    assert found == {True, False}
