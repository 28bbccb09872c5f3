"""Qwen2-MoE, also Qwen1.5-MoE: Qwen2 with MoEs that have a shared expert, weighted by the sigmoid of a linear map."""

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
    read_attention,
    read_decoder,
    same_in_all_layers,
    write_decoder,
)
from moe_jax.conversion.families.parts.which_layers import read_layers, read_windows, write_layers, write_windows
from moe_jax.conversion.table import linear
from moe_jax.models import ModelConfig

SHARED_EXPERT = "shared_expert_intermediate_size"


def _read(config: HFConfig) -> ModelConfig:
    biases = ("q", "k", "v") if config.flag("qkv_bias") else ()
    # Unlike in Qwen2, windows are in every second layer, and below `max_window_layers`.
    windows = read_windows(config, slides=lambda i, limit: i % 2 == 0 and i < limit)
    attention = [read_attention(config, biases=biases, sliding_window=window) for window in windows]
    return read_decoder(config, "qwen2_moe", read_layers(config, attention, shared_expert=SHARED_EXPERT))


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config),
        "qkv_bias": same_in_all_layers(config, "q/k/v bias", lambda layer: bool(layer.attention.biases)),
        **write_windows(config),
        **write_layers(config, shared_expert=SHARED_EXPERT),
    }


FAMILY = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    classifier=SCORE,
    defaults={
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "intermediate_size": 5632,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        SHARED_EXPERT: 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *ATTENTION,
        *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router"),
        *linear("model.layers.{i}.mlp.shared_expert_gate", "layers/{i}/mlp/router/universal"),
        *linear("model.layers.{i}.mlp.shared_expert.gate_proj", "layers/{i}/mlp/universal/gate"),
        *linear("model.layers.{i}.mlp.shared_expert.up_proj", "layers/{i}/mlp/universal/up"),
        *linear("model.layers.{i}.mlp.shared_expert.down_proj", "layers/{i}/mlp/universal/down"),
        *gated_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *GATED_FFN,
        *HEAD,
    ),
    universal="sigmoid",
)
