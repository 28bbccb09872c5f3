"""OLMoE: q/k norm over the whole projection, every layer an MoE whose gate weights are not renormalised."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual_keys as usual
from moe_jax.conversion.families.family import ATTENTION, EMBEDDING, HEAD, Family, gated_experts
from moe_jax.conversion.table import linear
from moe_jax.models import ModelConfig, MoEConfig


def _read(config: HFConfig) -> ModelConfig:
    config.require("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    biases, clip_qkv = usual.read_biases(config), config.number("clip_qkv")
    attention = usual.read_attention(config, biases=biases, qk_norm="projection", clip_qkv=clip_qkv)
    moe = MoEConfig(
        expert=usual.read_gated_ffn(config),
        num_experts=config.required_integer("num_experts"),
        top_k=config.required_integer("num_experts_per_tok"),
        gate="topk_softmax" if config.flag("norm_topk_prob") else "softmax_topk",
        balance_coef=config.required_number("router_aux_loss_coef"),
    )
    return usual.read_decoder(config, "olmoe", usual.repeat_layers(config, attention, moe))


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    return {
        **usual.write_decoder(config),
        **usual.write_ffn(moe.expert),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.gate == "topk_softmax",
        "router_aux_loss_coef": moe.balance_coef,
        **usual.write_biases(config),
        "clip_qkv": usual.same_in_all_layers(config, "clip_qkv", lambda layer: layer.attention.clip_qkv),
    }


OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
        "norm_topk_prob": False,
        "eos_token_id": 50279,
    },
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *ATTENTION,
        *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router"),
        *gated_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *HEAD,
    ),
)
