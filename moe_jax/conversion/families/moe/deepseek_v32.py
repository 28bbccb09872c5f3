"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose queries attend to the keys that an indexer chooses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.latent_attention import (
    LATENT_ATTENTION,
    read_latent_attention,
    write_latent_decoder,
)
from moe_jax.conversion.families.moe.usual_moe import (
    FURTHER,
    MOE_MLP,
    above_dense,
    check_further,
    listed_as_sparse,
    read_balanced,
    read_moe_layers,
    write_balanced,
    write_first_dense,
    write_moe_layers,
    write_sparse,
)
from moe_jax.conversion.table import Row, Table
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, IndexerConfig, ModelConfig

_INDEXED = "indexed_attention"
_FULL, _SHARED = "full", "shared"


def _read_attention(config: HFConfig, *, interleaved: bool) -> AttentionConfig:
    """Reads latent attention with an indexer, whose rotated pairs are neighbours if they are `interleaved`."""
    config.require("q_lora_rank")
    attention = read_latent_attention(config, interleaved=True)
    assert attention.latent is not None
    indexer = IndexerConfig(
        num_heads=config.required_integer("index_n_heads"),
        head_dim=config.required_integer("index_head_dim"),
        top_k=config.required_integer("index_topk"),
        interleaved=interleaved,
    )
    return replace(attention, latent=replace(attention.latent, indexer=indexer))


def _read_decoder(config: HFConfig, family: str, attention: Sequence[AttentionConfig]) -> ModelConfig:
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    config.must_be("moe_layer_freq", 1)
    config.must_be("rope_interleave", True)
    config.must_be("mlp_bias", False)
    config.must_be("layer_types", [_INDEXED] * len(attention))
    check_further(config)
    moes = listed_as_sparse(config)
    moes = above_dense(config) if moes is None else moes
    # The published code has no balance loss.
    layers = read_moe_layers(config, attention, moes, balance_coef=0.0, **read_balanced(config))
    return usual.read_decoder(config, family, layers)


def _indexer(config: ModelConfig, attention: AttentionConfig) -> IndexerConfig:
    indexer = None if attention.latent is None else attention.latent.indexer
    if indexer is None:
        raise InputError(f"the format of {config.family!r} has attention with an indexer only")
    return indexer


def _with_own_indexers(config: ModelConfig) -> ModelConfig:
    """Returns the model as if every layer had an indexer of its own."""
    layers = []
    for layer in config.layers:
        attention = layer.softmax_attention
        indexer = replace(_indexer(config, attention), shared=False)
        assert attention.latent is not None
        attention = replace(attention, latent=replace(attention.latent, indexer=indexer))
        layers.append(replace(layer, attention=attention))
    return replace(config, layers=tuple(layers))


def _write_decoder(config: ModelConfig) -> dict[str, Any]:
    indexer = _indexer(config, config.layers[0].softmax_attention)
    return {
        **write_latent_decoder(config),
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
        **write_first_dense(config),
        **write_sparse(config),
        **write_moe_layers(config),
        **write_balanced(config),
        "num_nextn_predict_layers": 0,
    }


def _read_v32(config: HFConfig) -> ModelConfig:
    attention = _read_attention(config, interleaved=False)
    return _read_decoder(config, "deepseek_v32", [attention] * usual.num_layers(config))


# --- GLM-5, some of whose layers may take the choice of another one -------------------------------


def _read_glm(config: HFConfig) -> ModelConfig:
    config.must_be("indexer_rope_interleave", True)
    attention = _read_attention(config, interleaved=True)
    assert attention.latent is not None and attention.latent.indexer is not None
    shared = replace(
        attention, latent=replace(attention.latent, indexer=replace(attention.latent.indexer, shared=True))
    )
    return _read_decoder(
        config, "glm_moe_dsa", [shared if kind == _SHARED else attention for kind in _indexer_types(config)]
    )


def _indexer_types(config: HFConfig) -> Sequence[str]:
    """Reads which layers have an indexer: a list, or every n-th one from some layer on."""
    count, types = usual.num_layers(config), config.texts("indexer_types")
    every, first = config.integer("index_topk_freq"), config.integer("index_skip_topk_offset")
    config.must_be("index_topk_pattern", None)
    if types is None:
        every, first = max(1 if every is None else every, 1), 2 if first is None else first
        types = tuple(_SHARED if max(i - first + 1, 0) % every else _FULL for i in range(count))
    if len(types) != count or not set(types) <= {_FULL, _SHARED} or types[0] != _FULL:
        raise InputError(
            f"config.json: indexer_types has {len(types)} entries {shown(sorted(set(types)))}, expected {count} "
            f"(num_hidden_layers), each {_FULL!r} or {_SHARED!r}, and {_FULL!r} for the first layer"
        )
    return types


def _write_glm(config: ModelConfig) -> dict[str, Any]:
    indexers = [_indexer(config, layer.softmax_attention) for layer in config.layers]
    return {
        **_write_decoder(_with_own_indexers(config)),
        "indexer_types": [_SHARED if one.shared else _FULL for one in indexers],
    }


_INDEXER: Table = tuple(
    Row(f"model.layers.{{i}}.self_attn.indexer.{theirs}", f"layers/{{i}}/attention/indexer/{ours}", transpose)
    for theirs, ours, transpose in (
        ("wq_b.weight", "q", True),
        ("wk.weight", "k", True),
        ("k_norm.weight", "k_scale", False),
        ("k_norm.bias", "k_bias", False),
        ("weights_proj.weight", "weights", True),
    )
)
_TABLE: Table = (*usual.EMBEDDING, *LATENT_ATTENTION, *_INDEXER, *MOE_MLP, *usual.HEAD)
# Derived or not read, and notes of training.
_HARMLESS = ("head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size")
_DEFAULTS = {
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_head_dim": 128,
    "index_topk": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "n_group": 8,
        "topk_group": 4,
        "index_n_heads": 64,
    },
    harmless=_HARMLESS,
    read=_read_v32,
    write=_write_decoder,
    table=_TABLE,
    further=FURTHER,
    further_form="deepseek",
)

GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "intermediate_size": 12288,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    harmless=_HARMLESS,
    read=_read_glm,
    write=_write_glm,
    table=_TABLE,
    further=FURTHER,
)
