"""gpt-oss beyond what every family is tested for: caches, packed documents, clamps that matter, and what is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import moe_jax
from moe_jax.conversion import read_hf_config, write_hf_config
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import load_model
from moe_jax.models import AttentionConfig, LatentConfig, RopeConfig, config_from_json, config_to_json
from moe_jax.nn import Decoder, init_cache
from tests.families.cases import CASES, SMALL
from tests.families.reference import random_model, saved
from tests.support.hf_checkpoints import CONFIGS
from tests.support.tiers import long

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 40))
APPLY = nnx.jit(lambda model, tokens, **options: model(tokens, **options))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random small model of Transformers whose experts' gates often reach their clamps, and ours."""
    reference = random_model(CASES["gpt_oss"], "gpt_oss")
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(8.0)
    return reference, load_model(saved(reference, tmp_path_factory.mktemp("gpt-oss")))


def logits_of(reference, tokens=TOKENS):
    with torch.no_grad():
        return reference(torch.tensor(tokens), use_cache=False).logits.numpy()


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


def test_clamps_are_those_of_transformers(pair):
    reference, model = pair
    expected = logits_of(reference)
    assert close(APPLY(model, jnp.asarray(TOKENS, jnp.int32)).logits, expected)
    for layer in reference.model.layers:
        layer.mlp.experts.limit = 1e9
    without = logits_of(reference)
    for layer in reference.model.layers:
        layer.mlp.experts.limit = 7.0
    assert not close(without, expected)  # otherwise equality would say little


@long
@pytest.mark.parametrize("pieces", [(20, 3, 17), (40,), (1,) * 40], ids=["in pieces", "at once", "token by token"])
def test_a_cache_gives_the_same_logits(pair, pieces):
    """Pieces are longer and shorter than what is attended to without chunks, and than the window."""
    reference, model = pair
    expected = logits_of(reference)
    caches, start = init_cache(model.config, 2, 44, jnp.dtype("float32")), 0
    for length in pieces:
        positions = jnp.broadcast_to(jnp.arange(start, start + length, dtype=jnp.int32)[None], (2, length))
        tokens = jnp.asarray(TOKENS[:, start : start + length], jnp.int32)
        out = APPLY(model, tokens, positions=positions, caches=caches)
        assert close(out.logits, expected[:, start : start + length])
        caches, start = out.caches, start + length


@long
def test_packed_documents_are_those_alone(pair):
    reference, model = pair
    segments = jnp.asarray([[1] * 13 + [2] * 27] * 2, jnp.int32)
    positions = jnp.asarray([[*range(13), *range(27)]] * 2, jnp.int32)
    got = APPLY(model, jnp.asarray(TOKENS, jnp.int32), positions=positions, segment_ids=segments).logits
    assert close(got[:, :13], logits_of(reference, TOKENS[:, :13]))
    assert close(got[:, 13:], logits_of(reference, TOKENS[:, 13:]))


def test_a_config_that_says_nothing_of_its_rotation_means_that_of_the_published_models():
    keys = {key: value for key, value in CONFIGS["gpt_oss"].items() if key != "rope_scaling"}
    published = read_hf_config(keys).rope
    assert (published.scaling, published.factor, published.original_max_positions) == ("yarn", 32.0, 4096)
    assert (published.theta, published.truncate) == (150000.0, False)
    plain = dataclasses.replace(read_hf_config(keys), rope=RopeConfig(theta=10.0))
    written = write_hf_config(plain)
    assert written["rope_scaling"] == {"rope_type": "default"} and read_hf_config(written).rope == plain.rope


def test_windows_of_every_second_layer():
    keys = {key: value for key, value in CONFIGS["gpt_oss"].items() if key != "layer_types"}
    assert [layer.attention.sliding_window for layer in read_hf_config(keys).layers] == [8, None, 8]
    every = {**keys, "layer_types": ["full_attention"] * 3}
    assert {layer.attention.sliding_window for layer in read_hf_config(every).layers} == {None}


def changed(config, **changes):
    """The config with other attention, or other experts, in every layer."""
    attention = {key: value for key, value in changes.items() if key == "sinks"}
    expert = {key: value for key, value in changes.items() if key not in attention}
    layers = [
        dataclasses.replace(
            layer,
            attention=dataclasses.replace(layer.attention, **attention),
            mlp=dataclasses.replace(layer.mlp, expert=dataclasses.replace(layer.mlp.expert, **expert)),
        )
        for layer in config.layers
    ]
    return dataclasses.replace(config, layers=tuple(layers))


@pytest.mark.parametrize("change", [{"sinks": False}, {"activation": "silu"}, {"bias": False}], ids=str)
def test_what_the_format_cannot_say_is_refused(change, tmp_path):
    config = changed(read_hf_config(CONFIGS["gpt_oss"]), **change)
    model = moe_jax.Model(Decoder(config, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match="gpt_oss"):
        moe_jax.export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sinks_are_in_a_config_that_has_them_alone():
    with_sinks = read_hf_config(CONFIGS["gpt_oss"])
    without = changed(with_sinks, sinks=False)
    assert "sinks" in str(config_to_json(with_sinks)) and "sinks" not in str(config_to_json(without))
    for config in (with_sinks, without):
        assert config_from_json(config_to_json(config)) == config
    assert "sinks" in with_sinks.layers[0].attention.describe()


def test_latent_attention_has_no_sinks():
    latent = LatentConfig(kv_rank=16, rope_dim=4, value_dim=8)
    with pytest.raises(InputError, match="latent attention has"):
        AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=12, latent=latent, sinks=True)


def test_gguf_is_refused_by_name(tmp_path):
    model = moe_jax.Model(Decoder(read_hf_config(CONFIGS["gpt_oss"]), rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match="gpt_oss"):
        moe_jax.export(model, tmp_path / "model.gguf", format="gguf")
