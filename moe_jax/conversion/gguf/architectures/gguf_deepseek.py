"""The architecture of DeepSeek-V2 and V3 in GGUF files: latent attention, and MoEs with shared experts over dense FFNs.

Files hold the map from the latent to keys and values as two stacks with a matrix for each head: `attn_k_b`, which maps
queries to the latent, and `attn_v_b`. Attention is then described as it is computed, with one key that all heads share.
Older files hold it whole, as `attn_kv_b`, and describe as many keys as heads. We write the newer form and read both.
"""

from collections.abc import Collection, Mapping
from typing import Any

from moe_jax.conversion.gguf.architectures.gguf_description import (
    EMBEDDING_ROW,
    EXPERTS,
    FFN,
    HEAD,
    RMS_NORM,
    SHARED_EXPERT,
    YARN_MAGNITUDE,
    Architecture,
    Metadata,
)
from moe_jax.conversion.table import Heads, Row, Table, linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, LatentConfig, ModelConfig

_SOFTMAX, _SIGMOID = 1, 2  # what makes scores of an expert's logits
_WHOLE, _KEYS, _VALUES = "attn_kv_b", "attn_k_b", "attn_v_b"
_KV_UP = "layers/{i}/attention/kv_up"
_BIASES = tuple(f"{name}.bias" for name in ("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_output"))
_NAME = "'deepseek2'"

# --- reading --------------------------------------------------------------------------------------


def _config(metadata: Metadata) -> dict[str, Any]:
    """Returns the keys of DeepSeek-V3, whose scores of experts are sigmoids, or of V2."""
    metadata.must_be("expert_gating_func", _SOFTMAX, 0, _SIGMOID)
    is_v3 = metadata.get("expert_gating_func") == _SIGMOID
    keys = {"model_type": "deepseek_v3" if is_v3 else "deepseek_v2", **_read_attention(metadata)}
    keys |= {
        "first_k_dense_replace": metadata.number("leading_dense_block_count", 0),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "n_routed_experts": metadata.number("expert_count", 0) or None,
        "n_shared_experts": metadata.number("expert_shared_count", 0) or None,
    }
    return keys | (_read_choice(metadata, is_v3=is_v3) if keys["n_routed_experts"] else {})


def _read_choice(metadata: Metadata, *, is_v3: bool) -> dict[str, Any]:
    """Returns the keys about how experts are chosen and weighted."""
    groups, used = (metadata.number(key, 1) or 1 for key in ("expert_group_count", "expert_group_used_count"))
    return {
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": used,
        **({} if is_v3 else {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}),
    }


def _read_attention(metadata: Metadata) -> dict[str, Any]:
    heads, rank = metadata.number("attention.head_count"), metadata.number("attention.kv_lora_rank")
    rotated = metadata.number("rope.dimension_count")
    metadata.must_be("rope.scaling.yarn_attn_factor", 1.0)
    whole, keys = (metadata.shape(f"blk.0.{name}.weight") for name in (_WHOLE, _KEYS))
    if whole is not None:
        metadata.must_be("attention.head_count_kv", heads)
        head_dim, value_dim = (metadata.number(f"attention.{one}_length") for one in ("key", "value"))
    else:
        metadata.must_be("attention.head_count_kv", 1)
        metadata.must_be("attention.key_length", rank + rotated)
        metadata.must_be("attention.value_length", rank)
        head_dim, value_dim = (metadata.number(f"attention.{one}_length_mla") for one in ("key", "value"))
    if head_dim <= rotated:
        raise InputError(
            f"{metadata.full_name('rope.dimension_count')} is {shown(rotated)}, but keys are {shown(head_dim)} wide, "
            "and a part of them is not rotated"
        )
    # Before a run of elements is planned for every head that the file speaks of.
    expected = (heads, rank, head_dim - rotated)
    if whole is None and keys != expected:
        found = "is missing" if keys is None else f"has shape {shown(list(keys))}"
        raise InputError(f"blk.0.{_KEYS}.weight {found}, expected {shown(list(expected))}, as the metadata say")
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.number("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value_dim,
    }


# --- writing --------------------------------------------------------------------------------------


def _metadata(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    attention, latent = _attention_of(config)
    found: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent.kv_rank,
        "attention.key_length": latent.kv_rank + latent.rope_dim,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": attention.head_dim,
        "attention.value_length_mla": latent.value_dim,
        "rope.dimension_count": latent.rope_dim,
        "leading_dense_block_count": keys["first_k_dense_replace"],
        "expert_feed_forward_length": keys.get("moe_intermediate_size", keys["intermediate_size"]),
        "expert_shared_count": keys.get("n_shared_experts") or 0,
        **_query_rank(config, latent),
        **_yarn(config),
    }
    return found | (_experts(config, keys) if config.moe_layers else {})


def _attention_of(config: ModelConfig) -> tuple[AttentionConfig, LatentConfig]:
    attention = config.layers[0].softmax_attention
    assert attention.latent is not None, "the families have latent attention only"
    return attention, attention.latent


def _query_rank(config: ModelConfig, latent: LatentConfig) -> dict[str, Any]:
    """Returns the key for the rank of queries; 0: they have none."""
    # llama.cpp knows models without it by their numbers of layers and tokens, and does not look for the key there.
    is_lite = config.num_layers in (26, 27) or (config.num_layers, config.vocab_size) == (48, 128256)
    if is_lite and latent.q_rank is not None:
        raise InputError(
            f"llama.cpp reads no models of {_NAME} with {config.num_layers} layers whose queries come from a latent; "
            "keep it as a checkpoint"
        )
    return {} if is_lite else {"attention.q_lora_rank": latent.q_rank or 0}


def _yarn(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    if rope.scaling != "yarn":
        return {}
    if not rope.mscale_all_dim or rope.mscale != rope.mscale_all_dim or rope.attention_factor is not None:
        raise InputError(
            f"llama.cpp reads YaRN of {_NAME} only with equal mscale and mscale_all_dim, and without "
            f"attention_factor, here {rope.mscale}, {rope.mscale_all_dim} and {rope.attention_factor}; keep the model "
            "as a checkpoint"
        )
    return {YARN_MAGNITUDE: 0.1 * rope.mscale_all_dim}


def _experts(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    moe = config.moe(config.moe_layers[0])
    if not moe.universal_beside:
        raise InputError(f"llama.cpp reads MoEs of {_NAME} with shared experts only; keep the model as a checkpoint")
    groups, used = moe.selection.groups, moe.selection.top_groups
    if groups > 1 and not (used < groups <= moe.num_experts // 2):
        raise InputError(
            f"llama.cpp reads groups of experts of {_NAME} only if tokens go to fewer than all groups, of two experts "
            f"or more, here {used} of {groups} groups of {moe.num_experts // groups}; keep the model as a checkpoint"
        )
    found = {
        "expert_count": moe.num_experts,
        "expert_used_count": moe.top_k,
        "expert_weights_scale": float(moe.gate_scale),
        "expert_gating_func": _SIGMOID if "sigmoid" in moe.gate else _SOFTMAX,
    }
    if keys.get("norm_topk_prob"):
        found["expert_weights_norm"] = True
    if "n_group" in keys:
        found |= {"expert_group_count": groups, "expert_group_used_count": used}
    return found


def _notes(config: ModelConfig) -> list[str]:
    notes, (_, latent) = [], _attention_of(config)
    if config.norm_eps != latent.norm_eps:
        notes.append(
            f"note: llama.cpp norms latents with epsilon {config.norm_eps:g}, this model with {latent.norm_eps:g}: its "
            "logits differ a little"
        )
    selections = [config.moe(i).selection for i in config.moe_layers]
    if any(one.groups > 1 and one.group_score != "best_two" for one in selections):
        notes.append(
            "note: llama.cpp ranks groups of experts by their best two, this model by their best one: it has other "
            "logits where that counts"
        )
    return notes


# --- both -----------------------------------------------------------------------------------------


def _rows(config: ModelConfig, names: Collection[str]) -> Table:
    """Returns the rows of the map from the latent to keys and values, whole if the file has it so."""
    if f"blk.0.{_WHOLE}.weight" in names:
        return linear(f"blk.{{i}}.{_WHOLE}", _KV_UP)
    attention, latent = _attention_of(config)
    unrotated = attention.head_dim - latent.rope_dim
    width = unrotated + latent.value_dim
    keys, values = (Heads(attention.num_heads, width, *ends) for ends in ((0, unrotated), (unrotated, width)))
    return (
        Row(f"blk.{{i}}.{_KEYS}.weight", f"{_KV_UP}/kernel", heads=keys),
        Row(f"blk.{{i}}.{_VALUES}.weight", f"{_KV_UP}/kernel", transpose=True, heads=values),
    )


_ATTENTION: Table = (
    *norm("blk.{i}.attn_norm", "layers/{i}/attention_norm"),
    *linear("blk.{i}.attn_q", "layers/{i}/attention/q"),
    *linear("blk.{i}.attn_q_a", "layers/{i}/attention/q_down"),
    *norm("blk.{i}.attn_q_a_norm", "layers/{i}/attention/q_norm"),
    *linear("blk.{i}.attn_q_b", "layers/{i}/attention/q_up"),
    *linear("blk.{i}.attn_kv_a_mqa", "layers/{i}/attention/kv_down"),
    *norm("blk.{i}.attn_kv_a_norm", "layers/{i}/attention/kv_norm"),
    *linear("blk.{i}.attn_output", "layers/{i}/attention/o"),
    *norm("blk.{i}.ffn_norm", "layers/{i}/mlp_norm"),
)

DEEPSEEK = {
    "deepseek2": Architecture(
        config=_config,
        metadata=_metadata,
        families=("deepseek_v2", "deepseek_v3"),
        keys=RMS_NORM,
        unread=_BIASES,
        latent=True,
        leading_dense=True,
        rows=_rows,
        notes=_notes,
        table=(
            *EMBEDDING_ROW,
            *_ATTENTION,
            *FFN,
            Row("blk.{i}.exp_probs_b.bias", "layers/{i}/mlp/router/selection_bias"),
            *EXPERTS,
            *SHARED_EXPERT,
            *HEAD,
        ),
    ),
}
