"""Qwen3: q/k norm per head, heads of a width of their own; optionally a sliding window on some layers."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    ATTENTION,
    EMBEDDING,
    GATED_FFN,
    HEAD,
    SCORE,
    Family,
    dense_ffn,
    read_attention,
    read_decoder,
    read_gated_ffn,
    same_in_all_layers,
    write_activation,
    write_decoder,
)
from moe_jax.conversion.families.parts.which_layers import read_windows, write_windows
from moe_jax.models import LayerConfig, ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    config.require("head_dim")
    biases = ("q", "k", "v", "o") if config.flag("attention_bias") else ()
    ffn = read_gated_ffn(config)
    layers = [
        LayerConfig(
            attention=read_attention(config, biases=biases, qk_norm="head", sliding_window=window),
            mlp=ffn,
        )
        for window in read_windows(config)
    ]
    return read_decoder(config, "qwen3", layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    ffn = dense_ffn(config)
    return {
        **write_decoder(config),
        "intermediate_size": ffn.dim,
        "hidden_act": write_activation(ffn),
        "attention_bias": same_in_all_layers(config, "attention bias", lambda layer: bool(layer.attention.biases)),
        **write_windows(config),
    }


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    classifier=SCORE,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=_read,
    write=_write,
    table=(*EMBEDDING, *ATTENTION, *GATED_FFN, *HEAD),
    moe_formats=("qwen3_moe",),
)
