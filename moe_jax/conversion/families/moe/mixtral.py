"""Mixtral: Mistral with an MoE in every layer; the softmax is over the chosen experts."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    SCORE,
    Family,
    gated_experts,
    read_attention,
    read_decoder,
    read_gated_ffn,
    repeat_layers,
    same_in_all_layers,
    uniform_moe,
    write_activation,
    write_decoder,
)
from moe_jax.conversion.table import FUSED, PER_EXPERT, linear
from moe_jax.models import ModelConfig, MoEConfig


def _read(config: HFConfig) -> ModelConfig:
    config.require("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef")
    attention = read_attention(config, sliding_window=config.integer("sliding_window"))
    moe = MoEConfig(
        expert=read_gated_ffn(config),
        num_experts=config.required_integer("num_local_experts"),
        top_k=config.required_integer("num_experts_per_tok"),
        gate="topk_softmax",
        balance_coef=config.required_number("router_aux_loss_coef"),
    )
    return read_decoder(config, "mixtral", repeat_layers(config, attention, moe))


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = uniform_moe(config)
    return {
        **write_decoder(config),
        "intermediate_size": moe.expert.dim,
        "hidden_act": write_activation(moe.expert),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_coef,
        "sliding_window": same_in_all_layers(config, "sliding window", lambda layer: layer.attention.sliding_window),
    }


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    classifier=SCORE,
    defaults={
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *ATTENTION,
        *linear("model.layers.{i}.block_sparse_moe.gate", "layers/{i}/mlp/router", PER_EXPERT),
        *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router", FUSED),
        *gated_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *HEAD,
    ),
)
