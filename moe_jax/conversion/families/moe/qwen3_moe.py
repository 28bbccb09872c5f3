"""Qwen3-MoE: Qwen3 with MoEs in all layers, or in every n-th except for some listed ones; the others are dense."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    ATTENTION,
    EMBEDDING,
    GATED_FFN,
    HEAD,
    SCORE,
    Family,
    gated_experts,
    num_layers,
    read_attention,
    read_decoder,
    same_in_all_layers,
    write_decoder,
)
from moe_jax.conversion.families.parts.which_layers import read_layers, write_layers
from moe_jax.conversion.table import linear
from moe_jax.models import ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    # Unlike in Qwen3, all layers have the window: `max_window_layers` and `layer_types` have no effect.
    window = config.integer("sliding_window") if config.flag("use_sliding_window") else None
    biases = ("q", "k", "v", "o") if config.flag("attention_bias") else ()
    attention = read_attention(config, biases=biases, qk_norm="head", sliding_window=window)
    return read_decoder(config, "qwen3_moe", read_layers(config, [attention] * num_layers(config)))


def _write(config: ModelConfig) -> dict[str, Any]:
    window = same_in_all_layers(config, "sliding window", lambda layer: layer.attention.sliding_window)
    return {
        **write_decoder(config),
        "attention_bias": same_in_all_layers(config, "attention bias", lambda layer: bool(layer.attention.biases)),
        "use_sliding_window": window is not None,
        **({} if window is None else {"sliding_window": window}),
        **write_layers(config),
    }


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    classifier=SCORE,
    defaults={
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    # All layers have the window.
    harmless=("max_window_layers", "layer_types"),
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *ATTENTION,
        *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router"),
        *gated_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *GATED_FFN,
        *HEAD,
    ),
)
