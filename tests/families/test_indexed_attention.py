"""Attention to the keys that an indexer chooses, beyond what every family is tested for; and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import moe_jax
from moe_jax.conversion import read_hf_config, write_hf_config
from moe_jax.conversion.gguf.gguf_metadata import described
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.model_io.loading import load_model
from moe_jax.models import IndexerConfig, LatentConfig, config_from_json, config_to_json
from moe_jax.nn import init_cache, make_context
from moe_jax.training.flops import train_flops_per_token
from tests.families.cases import CASES, SMALL
from tests.families.reference import random_model, saved
from tests.support.hf_checkpoints import CONFIGS, assert_same_bits, read_tensors
from tests.support.tiers import long

NAME, LENGTH = "deepseek_v32", 40
TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, LENGTH))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random small model of Transformers, whose queries choose 6 keys, and the checkpoint of it."""
    reference = random_model(CASES[NAME], NAME)
    return reference, saved(reference, tmp_path_factory.mktemp("indexed"))


def logits_of(reference, tokens=TOKENS):
    with torch.no_grad():
        return reference(torch.tensor(tokens), use_cache=False).logits.numpy()


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


def test_the_choice_matters(pair):
    reference, _ = pair
    expected = logits_of(reference)
    tops = [layer.self_attn.indexer.index_topk for layer in reference.model.layers]
    for layer in reference.model.layers:
        layer.self_attn.indexer.index_topk = LENGTH
    without = logits_of(reference)
    for layer, top in zip(reference.model.layers, tops, strict=True):
        layer.self_attn.indexer.index_topk = top
    assert close(without[:, :6], expected[:, :6]) and not close(without, expected)


@long
@pytest.mark.parametrize("pieces", [(1, 35, 4), (1,) * 9], ids=["in pieces", "token by token"])
def test_a_cache_gives_the_same_logits(pair, pieces):
    reference, source = pair
    model, expected = load_model(source), logits_of(reference)
    apply = nnx.jit(lambda model, tokens, **options: model(tokens, **options))
    caches, start = init_cache(model.config, 2, 44, jnp.dtype("float32")), 0
    for length in pieces:
        positions = jnp.broadcast_to(jnp.arange(start, start + length, dtype=jnp.int32)[None], (2, length))
        tokens = jnp.asarray(TOKENS[:, start : start + length], jnp.int32)
        out = apply(model, tokens, positions=positions, caches=caches)
        assert close(out.logits, expected[:, start : start + length])
        caches, start = out.caches, start + length


@long
def test_packed_documents_choose_from_themselves(pair):
    reference, source = pair
    segments = jnp.asarray([[1] * 13 + [2] * 27] * 2, jnp.int32)
    positions = jnp.asarray([[*range(13), *range(27)]] * 2, jnp.int32)
    got = load_model(source)(jnp.asarray(TOKENS, jnp.int32), positions=positions, segment_ids=segments).logits
    assert close(got[:, :13], logits_of(reference, TOKENS[:, :13]))
    assert close(got[:, 13:], logits_of(reference, TOKENS[:, 13:]))


@long
def test_a_mesh_gives_the_same_logits(pair):
    reference, source = pair
    mesh = make_mesh({"fsdp": 2, "tensor": 2, "expert": 2})
    graphdef, state = nnx.split(load_model(source))
    state = jax.device_put(state, state_shardings(state, mesh))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x).logits)(state, jnp.asarray(TOKENS, jnp.int32))
    assert close(got, logits_of(reference))


@long
def test_every_verb_keeps_the_indexer(pair, tmp_path):
    reference, source = pair
    tokens, theirs = jnp.asarray(TOKENS, jnp.int32), read_tensors(source.path)
    moe_jax.adapt(source.path, tmp_path / "lora", method="lora", adapter="lora:2", targets="q_up,o")
    moe_jax.adapt(source.path, tmp_path / "perft", method="perft-s", adapter="parallel:2")
    for name in ("lora", "perft"):
        assert close(moe_jax.load(tmp_path / name).decoder(tokens).logits, logits_of(reference))
    moe_jax.export(tmp_path / "lora", tmp_path / "peft", format="peft")
    moe_jax.compress(source.path, tmp_path / "small", method="quantize", bits=8)
    moe_jax.export(tmp_path / "small", tmp_path / "back")
    ours = read_tensors(tmp_path / "back")
    names = [name for name in theirs if ".indexer." in name]
    assert len(names) == 2 * 5
    assert_same_bits({name: ours[name] for name in names}, {name: theirs[name] for name in names})


def test_a_shared_choice_is_refused_beyond_what_is_chosen():
    config = read_hf_config(CONFIGS["glm_moe_dsa"])
    assert [layer.attention.latent.indexer.shared for layer in config.layers] == [False, True]
    make_context(config, (1, 5))
    for given in ({"shape": (1, 6)}, {"shape": (1, 1), "num_slots": 6}):
        with pytest.raises(InputError, match="layer 1 takes"):
            make_context(config, **given)
    with pytest.raises(InputError, match="glm_moe_dsa"):
        described(config)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_what_cannot_be_is_refused():
    keys = CONFIGS["glm_moe_dsa"]
    for change, match in (
        ({"indexer_types": ["shared", "full"]}, "indexer_types has"),
        ({"indexer_types": ["full"]}, "indexer_types has"),
        ({"index_topk_pattern": "FS"}, "index_topk_pattern"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"index_head_dim": 2}, "head_dim=2 must"),
        ({"q_lora_rank": None}, "q_lora_rank"),
    ):
        with pytest.raises(InputError, match=match):
            read_hf_config({**keys, **change})
    with pytest.raises(InputError, match="q_rank is missing"):
        LatentConfig(kv_rank=4, rope_dim=2, value_dim=4, indexer=IndexerConfig(num_heads=1, head_dim=4, top_k=2))
    every = {key: value for key, value in keys.items() if key != "indexer_types"}
    every |= {"index_topk_freq": 2, "index_skip_topk_offset": 1, "num_hidden_layers": 4}
    every["mlp_layer_types"] = ["dense", "sparse"] * 2
    config = read_hf_config(every)
    assert [layer.attention.latent.indexer.shared for layer in config.layers] == [False, True] * 2
    assert write_hf_config(config)["indexer_types"] == ["full", "shared"] * 2
    with pytest.raises(InputError, match="deepseek_v32"):
        write_hf_config(dataclasses.replace(read_hf_config(CONFIGS["deepseek_v3"]), family="deepseek_v32"))


def test_operations_of_longer_rows_are_those_of_the_chosen_keys():
    config = read_hf_config(CONFIGS["deepseek_v32"])
    # Mean positions that are seen: 3 of 5, and of 6 tokens (1 + 2 + 3 + 4 + 5 + 5) / 6.
    heads = 6 * 4 * (12 + 12)
    indexer = 2 * (20 * 8 * 6 + 32 * (6 + 8)) + 2 * 8 * 6 * 3.5
    difference = train_flops_per_token(config, 6) - train_flops_per_token(config, 5)
    assert difference == pytest.approx(2 * (heads * (20 / 6 - 3) + indexer))
