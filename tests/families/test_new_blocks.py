"""Llama 4, Mistral 4 and Gemma 4 beyond what every family is tested for: caches, documents, blocks, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.conversion import read_hf_config, write_hf_config
from moe_jax.core.errors import InputError
from moe_jax.functional.attention import attention
from moe_jax.functional.attention_chunks import Visibility
from moe_jax.functional.position_embeddings import QueryScaleConfig, scaled_queries
from moe_jax.functional.routing.token_choices import NO_EXPERT, Routing, weighted_inputs
from moe_jax.model_io.loading import load_model
from moe_jax.models import AttentionConfig, config_from_json, config_to_json
from moe_jax.nn import init_cache
from moe_jax.training.flops import _mean_context
from tests.families.cases import CASES, SMALL
from tests.families.reference import random_model, saved
from tests.support.hf_checkpoints import CONFIGS
from tests.support.tiers import long

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 40))
APPLY = nnx.jit(lambda model, tokens, **options: model(tokens, **options))
BEGIN = nnx.jit(lambda model, tokens, **options: model(tokens, begins=True, **options))


@pytest.fixture(
    scope="module", params=["llama4_text", *(pytest.param(name, marks=long) for name in ("mistral4", "gemma4_text"))]
)
def pair(request, tmp_path_factory):
    """A random small model of Transformers, its logits, and ours; texts are five blocks, or three steps, long."""
    reference = random_model(CASES[request.param], request.param)
    return reference, load_model(saved(reference, tmp_path_factory.mktemp(request.param)))


def logits_of(reference, tokens=TOKENS):
    with torch.no_grad():
        return reference(torch.tensor(tokens), use_cache=False).logits.numpy()


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("pieces", "rings"),
    [
        ((23, 17), False),
        pytest.param((20, 3, 17), False, marks=long),
        pytest.param((1,) * 40, False, marks=long),
        pytest.param((13, *(1,) * 27), True, marks=long),
    ],
    ids=["in two pieces", "in pieces", "token by token", "in rings"],
)
def test_a_cache_gives_the_same_logits(pair, pieces, rings):
    """Pieces begin and end within blocks, and are longer and shorter than what is attended to without chunks."""
    reference, model = pair
    expected = logits_of(reference)
    caches, start = init_cache(model.config, 2, 44, jnp.dtype("float32"), rings=rings), 0
    for length in pieces:
        positions = jnp.broadcast_to(jnp.arange(start, start + length, dtype=jnp.int32)[None], (2, length))
        tokens = jnp.asarray(TOKENS[:, start : start + length], jnp.int32)
        out = (APPLY if start else BEGIN)(model, tokens, positions=positions, caches=caches)
        assert close(out.logits, expected[:, start : start + length])
        caches, start = out.caches, start + length


def test_packed_documents_are_those_alone(pair):
    """The second document begins within a block of the row, and has blocks, and steps, of its own."""
    reference, model = pair
    segments = jnp.asarray([[1] * 13 + [2] * 27] * 2, jnp.int32)
    positions = jnp.asarray([[*range(13), *range(27)]] * 2, jnp.int32)
    got = APPLY(model, jnp.asarray(TOKENS, jnp.int32), positions=positions, segment_ids=segments).logits
    assert close(got[:, :13], logits_of(reference, TOKENS[:, :13]))
    assert close(got[:, 13:], logits_of(reference, TOKENS[:, 13:]))


def test_blocks_are_documents_of_their_own():
    """Of rows longer than a chunk of queries, against a mask that is written down."""
    length, block = 150, 40
    q, k, v = (jax.random.normal(jax.random.key(i), (1, length, 1, 4)) for i in range(3))
    at = jnp.arange(length, dtype=jnp.int32)[None]
    visible = Visibility(at, at, jnp.where(at < 100, 1, 2), jnp.where(at < 100, 1, 2))
    inside = jnp.where(at < 100, at, at - 100)
    got = attention(q, k, v, visible.in_blocks(block, inside, inside), window=block, aligned=True)
    numbers = np.where(at[0] < 100, inside[0] // block, 100 + inside[0] // block)
    seen = (numbers[:, None] == numbers[None]) & (np.arange(length)[:, None] >= np.arange(length)[None])
    scores = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(4.0), -jnp.inf)
    expected = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_queries_grow_in_steps():
    q, positions = jnp.ones((1, 4, 1, 2)), jnp.asarray([[0, 6, 7, 15]])
    grow = QueryScaleConfig(coefficient=0.5, length=8)
    one = dataclasses.replace(grow, from_one=True)
    steps = np.log1p([0, 0, 0, 1]), np.log1p([0, 0, 1, 2])
    for config, expected in zip((grow, one), steps, strict=True):
        np.testing.assert_allclose(scaled_queries(q, config, positions)[0, :, 0, 0], 1 + 0.5 * expected, rtol=1e-6)


def test_every_input_is_weighted_by_its_own_choice():
    x = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    routing = Routing(jnp.asarray([[2, 0], [1, NO_EXPERT]]), jnp.asarray([[0.5, 2.0], [1.0, 0.0]]))
    rows, one = weighted_inputs(x, routing)
    np.testing.assert_array_equal(rows, [[0.5, 1.0], [2.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_array_equal(one.experts[:, 0], [2, 0, 1, NO_EXPERT])
    np.testing.assert_array_equal(one.weights[:, 0], [1.0, 1.0, 1.0, 0.0])


def test_blocks_cost_what_is_seen_in_them():
    plain = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    numbers = np.arange(50) // 8
    seen = (numbers[:, None] == numbers[None]) & (np.arange(50)[:, None] >= np.arange(50)[None])
    assert _mean_context(dataclasses.replace(plain, block_tokens=8), 50) == seen.sum() / 50


NEW_FIELDS = {
    "llama4_text": ("query_scale", "block_tokens", "weighs_inputs"),
    "mistral4": ("query_scale",),
    "gemma4_text": ("values_are_keys", "value_norm", "output_scale", "branch_norm_eps", "expert_scales"),
}


@pytest.mark.parametrize("family", NEW_FIELDS)
def test_new_fields_are_in_configs_that_have_them_alone(family):
    config = read_hf_config(CONFIGS[family])
    assert config_from_json(config_to_json(config)) == config
    assert all(name in str(config_to_json(config)) for name in NEW_FIELDS[family])
    others = str(config_to_json(read_hf_config(CONFIGS["mixtral"])))
    assert not any(name in others for name in NEW_FIELDS[family])


FOUR = {**CONFIGS["llama4_text"], "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}


def with_attention(config, layer, **fields):
    """The config with another attention in one layer."""
    layers = list(config.layers)
    layers[layer] = dataclasses.replace(layers[layer], attention=dataclasses.replace(layers[layer].attention, **fields))
    return dataclasses.replace(config, layers=tuple(layers))


@pytest.mark.parametrize(
    ("layer", "field"),
    [(0, {"qk_norm": "none"}), (1, {"query_scale": None}), (2, {"rope_interleaved": False}), (0, {"block_tokens": 4})],
    ids=str,
)
def test_what_the_format_cannot_say_of_one_layer_is_refused(layer, field):
    with pytest.raises(InputError, match="llama4_text"):
        write_hf_config(with_attention(read_hf_config(FOUR), layer, **field))


def test_layers_that_rotate_may_see_all():
    config = with_attention(read_hf_config(FOUR), 0, block_tokens=None)
    assert read_hf_config(write_hf_config(config)) == config


def test_weighted_inputs_are_not_in_formats_of_weighted_outputs():
    config = read_hf_config(CONFIGS["mixtral"])
    moe = dataclasses.replace(config.moe(0), weighs_inputs=True)
    layers = tuple(dataclasses.replace(layer, mlp=moe) for layer in config.layers)
    with pytest.raises(InputError, match="weighs_inputs"):
        write_hf_config(dataclasses.replace(config, layers=layers))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": [1]}, "no_rope_layers has 1"),
        ({"attention_chunk_size": None}, "needs an attention_chunk_size"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 2"),
        ({"moe_layers": [5]}, "not there"),
        ({"interleave_moe_layer_step": 0}, "at least 1"),
    ],
    ids=str,
)
def test_configs_that_contradict_themselves_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        read_hf_config({**CONFIGS["llama4_text"], **change})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "default"}, "rope type is"),
        ({"llama_4_scaling_beta": None}, "cannot be guessed"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_rotations_of_mistral4_that_are_not_there_are_refused(rope, message):
    given = {**CONFIGS["mistral4"]["rope_parameters"], **rope}
    with pytest.raises(InputError, match=message):
        read_hf_config({**CONFIGS["mistral4"], "rope_parameters": given})


def test_a_config_of_mistral4_that_says_nothing_of_its_rotation_means_that_of_the_published_model():
    keys = {key: value for key, value in CONFIGS["mistral4"].items() if key != "rope_parameters"}
    config = read_hf_config(keys)
    assert (config.rope.scaling, config.rope.factor, config.rope.original_max_positions) == ("yarn", 128.0, 8192)
    assert config.layers[0].attention.query_scale == QueryScaleConfig(coefficient=0.1, length=8192)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "inputs of single layers"),
        ({"num_kv_shared_layers": 1}, "several layers share"),
        ({"use_bidirectional_attention": "all"}, "text that sees"),
        ({"rope_parameters": {"other": {}}}, "rope_parameters has"),
        ({"per_layer_config": {"0": {"width": 3}}}, "per_layer_config of layer"),
        ({"per_layer_config": {"5": {}}}, "not there"),
        ({"layer_types": ["full_attention"] * 2, "per_layer_config": {"0": {"head_dim": 4}}}, "of other layers"),
    ],
    ids=str,
)
def test_what_is_not_known_of_gemma4_is_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        read_hf_config({**CONFIGS["gemma4_text"], **change})


def test_heads_of_gemma4_are_read_from_both_places():
    """Published configs have keys for layers that see all, and Transformers 5.24 writes a list of layers."""
    keys = CONFIGS["gemma4_text"]
    published = read_hf_config(keys)
    listed = {key: value for key, value in keys.items() if "global" not in key}
    listed["per_layer_config"] = {"01": {"head_dim": 16, "num_key_value_heads": 1}}
    assert read_hf_config(listed) == published
    assert [layer.attention.head_dim for layer in published.layers] == [8, 16]


def test_the_last_layer_of_gemma4_sees_all():
    keys = {key: value for key, value in CONFIGS["gemma4_text"].items() if key != "layer_types"}
    windows = [layer.attention.sliding_window for layer in read_hf_config({**keys, "num_hidden_layers": 8}).layers]
    assert windows == [8] * 5 + [None, 8, None]


@pytest.mark.parametrize("field", [{"expert_scales": False}, {"branch_norm_eps": None}, {"universal": "none"}], ids=str)
def test_experts_of_gemma4_have_scales_and_norms(field):
    config = read_hf_config(CONFIGS["gemma4_text"])
    layers = []
    for layer in config.layers:
        fields = {"branch_norm_eps": None, "universal_dim": None, **field} if "universal" in field else field
        layers.append(dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, **fields)))
    with pytest.raises(InputError, match="gemma4_text"):
        write_hf_config(dataclasses.replace(config, layers=tuple(layers)))
