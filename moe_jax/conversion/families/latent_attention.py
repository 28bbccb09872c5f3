"""Shared by families with multi-head latent attention: its keys and its tensors, as DeepSeek-V2 and -V3 have them."""

import dataclasses
import math
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.rope_keys import read_rope
from moe_jax.conversion.table import Table, linear, norm
from moe_jax.core.errors import InputError
from moe_jax.models import AttentionConfig, LatentConfig, ModelConfig, RopeConfig

LATENT_ATTENTION: Table = (
    *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
    *linear("model.layers.{i}.self_attn.q_proj", "layers/{i}/attention/q"),
    *linear("model.layers.{i}.self_attn.q_a_proj", "layers/{i}/attention/q_down"),
    *norm("model.layers.{i}.self_attn.q_a_layernorm", "layers/{i}/attention/q_norm"),
    *linear("model.layers.{i}.self_attn.q_b_proj", "layers/{i}/attention/q_up"),
    *linear("model.layers.{i}.self_attn.kv_a_proj_with_mqa", "layers/{i}/attention/kv_down"),
    *norm("model.layers.{i}.self_attn.kv_a_layernorm", "layers/{i}/attention/kv_norm"),
    *linear("model.layers.{i}.self_attn.kv_b_proj", "layers/{i}/attention/kv_up"),
    *linear("model.layers.{i}.self_attn.o_proj", "layers/{i}/attention/o"),
    *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
)


def read_latent_attention(config: HFConfig, *, interleaved: bool, rope: RopeConfig | None = None) -> AttentionConfig:
    """Reads multi-head latent attention; its scale depends on the rotary embedding (None: that of the usual keys)."""
    heads, kv_heads = config.required_integer("num_attention_heads"), config.integer("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise InputError(
            f"config.json: num_key_value_heads={kv_heads} must be num_attention_heads={heads}: latent attention makes "
            "keys and values for every head"
        )
    latent = LatentConfig(
        kv_rank=config.required_integer("kv_lora_rank"),
        rope_dim=config.required_integer("qk_rope_head_dim"),
        value_dim=config.required_integer("v_head_dim"),
        q_rank=config.integer("q_lora_rank"),
        interleaved=interleaved,
    )
    max_positions = config.required_integer("max_position_embeddings")
    rope = rope or read_rope(config, max_positions=max_positions, head_dim=latent.rope_dim)
    if rope.fraction != 1.0:
        raise InputError(
            f"config.json: partial_rotary_factor is {rope.fraction}, but qk_rope_head_dim says what of a head is "
            "rotated; leave it out"
        )
    head_dim = config.required_integer("qk_nope_head_dim") + latent.rope_dim
    downs = ("kv_down", "o") if latent.q_rank is None else ("q_down", "kv_down", "o")
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        biases=downs if config.flag("attention_bias") else (),
        latent=latent,
    )
    return dataclasses.replace(attention, scale=_scale(config, attention, rope))


def _scale(config: HFConfig, attention: AttentionConfig, rope: RopeConfig) -> float | None:
    """Returns the scale of scores: YaRN's `mscale_all_dim` is in it twice, for queries and for keys."""
    if rope.scaling == "yarn":
        magnitude = 0.1 * (rope.mscale_all_dim or 0.0) * math.log(max(1.0, rope.factor)) + 1.0
        return None if magnitude == 1.0 else attention.score_scale * magnitude**2
    if rope.scaling != "none" and (config.unread_keys().get("rope_scaling") or {}).get("mscale_all_dim"):
        raise InputError(f"config.json: rope mscale_all_dim goes with type 'yarn', not with {rope.scaling!r}")
    return None


def write_latent_decoder(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_decoder` and `read_latent_attention` read."""
    attention = usual.same_attention(config, "attention", lambda attention: attention)
    latent = attention.latent
    if latent is None:
        raise InputError(f"the format of {config.family!r} has latent attention only")
    keys = usual.write_decoder(config) | {
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": attention.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": bool(attention.biases),
    }
    # Transformers means the rotated part by it, and derives it.
    del keys["head_dim"]
    scaling = keys["rope_scaling"]
    if scaling is not None and "rope_type" in scaling:
        # The code that came with the checkpoints knows this name; Transformers knows both names.
        keys["rope_scaling"] = {"type": scaling["rope_type"]} | {k: v for k, v in scaling.items() if k != "rope_type"}
    return keys
