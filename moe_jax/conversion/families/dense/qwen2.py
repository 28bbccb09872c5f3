"""Qwen2 and Qwen2.5: biases on queries, keys and values; optionally a sliding window on some layers."""

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
    write_activation,
    write_decoder,
)
from moe_jax.conversion.families.parts.which_layers import read_windows, write_windows
from moe_jax.models import LayerConfig, ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    ffn = read_gated_ffn(config)
    layers = [
        LayerConfig(attention=read_attention(config, biases=("q", "k", "v"), sliding_window=window), mlp=ffn)
        for window in read_windows(config)
    ]
    return read_decoder(config, "qwen2", layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    ffn = dense_ffn(config)
    return {
        **write_decoder(config),
        "intermediate_size": ffn.dim,
        "hidden_act": write_activation(ffn),
        **write_windows(config),
    }


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    classifier=SCORE,
    defaults={
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=_read,
    write=_write,
    table=(*EMBEDDING, *ATTENTION, *GATED_FFN, *HEAD),
    moe_formats=("qwen2_moe",),
)
