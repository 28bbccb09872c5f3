"""Llama, and models in its format: Yi, DeepSeek-Coder and many others."""

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
    bias = config.flag("attention_bias")
    attention = read_attention(config, biases=("q", "k", "v", "o") if bias else ())
    ffn = read_gated_ffn(config, bias=config.flag("mlp_bias"))
    return read_decoder(config, "llama", repeat_layers(config, attention, ffn))


def _write(config: ModelConfig) -> dict[str, Any]:
    ffn = dense_ffn(config)
    return {
        **write_decoder(config),
        "intermediate_size": ffn.dim,
        "hidden_act": write_activation(ffn),
        "attention_bias": same_in_all_layers(config, "attention bias", lambda layer: bool(layer.attention.biases)),
        "mlp_bias": ffn.bias,
    }


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    classifier=SCORE,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=_read,
    write=_write,
    table=(*EMBEDDING, *ATTENTION, *GATED_FFN, *HEAD),
    moe_formats=("mixtral", "qwen2_moe", "deepseek"),
)
