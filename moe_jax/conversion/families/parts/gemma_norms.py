"""Common parts of Gemma 1, 2 and 3: the scaled embedding, and from Gemma 2 on four norms and a scale of scores."""

import math
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import same_in_all_layers
from moe_jax.conversion.table import Table, linear, norm
from moe_jax.core.errors import InputError
from moe_jax.models import ModelConfig

FOUR_NORMS: Table = (
    *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
    *linear("model.layers.{i}.self_attn.q_proj", "layers/{i}/attention/q"),
    *linear("model.layers.{i}.self_attn.k_proj", "layers/{i}/attention/k"),
    *linear("model.layers.{i}.self_attn.v_proj", "layers/{i}/attention/v"),
    *linear("model.layers.{i}.self_attn.o_proj", "layers/{i}/attention/o"),
    *norm("model.layers.{i}.self_attn.q_norm", "layers/{i}/attention/q_norm"),
    *norm("model.layers.{i}.self_attn.k_norm", "layers/{i}/attention/k_norm"),
    *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/attention_output_norm"),
    *norm("model.layers.{i}.pre_feedforward_layernorm", "layers/{i}/mlp_norm"),
    *norm("model.layers.{i}.post_feedforward_layernorm", "layers/{i}/mlp_output_norm"),
)

DEFAULTS = {
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def read_embed_scale(config: HFConfig) -> float:
    """Returns the square root of the width, rounded to the dtype of the activations, as in Transformers."""
    d_model = config.required_integer("hidden_size")
    if d_model < 1:
        raise InputError(f"config.json: hidden_size={d_model} must be at least 1")
    return math.sqrt(d_model)


def refuse_bidirectional(config: HFConfig) -> None:
    """Raises `InputError` for encoders (EmbeddingGemma), whose tokens see those after them."""
    if config.flag("use_bidirectional_attention"):
        config.must_be("use_bidirectional_attention", False)


def read_biases(config: HFConfig) -> Any:
    """Reads which projections have a bias: all or none."""
    return ("q", "k", "v", "o") if config.flag("attention_bias") else ()


def write_biases(config: ModelConfig) -> dict[str, Any]:
    """Returns the key that `read_biases` reads."""
    return {"attention_bias": same_in_all_layers(config, "attention bias", lambda layer: bool(layer.attention.biases))}


def read_scale(config: HFConfig) -> float:
    """Reads the scale of attention scores: `query_pre_attn_scalar` to the power of -1/2."""
    scalar = config.required_number("query_pre_attn_scalar")
    if scalar <= 0:
        raise InputError(f"config.json: query_pre_attn_scalar={scalar} must be above 0")
    return scalar**-0.5


def write_scale(config: ModelConfig) -> dict[str, Any]:
    """Returns the key that `read_scale` reads: an integer, as in all checkpoints, if one gives exactly this scale."""
    attention = same_in_all_layers(
        config, "scale of scores", lambda layer: (layer.attention.scale, layer.attention.head_dim)
    )
    scalar = attention[1] if attention[0] is None else attention[0] ** -2
    nearest = round(scalar)
    return {"query_pre_attn_scalar": nearest if nearest and nearest**-0.5 == attention[0] else scalar}
