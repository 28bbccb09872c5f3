"""Mistral: Llama without biases, with one sliding window for all layers."""

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
    repeat_layers,
    same_in_all_layers,
    write_activation,
    write_decoder,
)
from moe_jax.models import ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    attention = read_attention(config, sliding_window=config.integer("sliding_window"))
    return read_decoder(config, "mistral", repeat_layers(config, attention, read_gated_ffn(config)))


def _write(config: ModelConfig) -> dict[str, Any]:
    ffn = dense_ffn(config)
    return {
        **write_decoder(config),
        "intermediate_size": ffn.dim,
        "hidden_act": write_activation(ffn),
        "sliding_window": same_in_all_layers(config, "sliding window", lambda layer: layer.attention.sliding_window),
    }


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    classifier=SCORE,
    defaults={
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=_read,
    write=_write,
    table=(*EMBEDDING, *ATTENTION, *GATED_FFN, *HEAD),
    moe_formats=("mixtral", "qwen2_moe", "deepseek"),
)
