"""Solar Open: an MoE in every layer, with DeepSeek-V3's choice of experts."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import (
    MOE_MLP,
    read_balanced,
    read_moe_layers,
    write_balanced,
    write_moe_layers,
)
from moe_jax.models import ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    config.must_be("first_k_dense_replace", 0)
    config.must_be("use_qk_norm", False)
    attention = usual.read_attention(config, biases=usual.read_biases(config, projections=("q", "k", "v")))
    count = usual.num_layers(config)
    layers = read_moe_layers(config, [attention] * count, range(count), balance_coef=0.0, **read_balanced(config))
    return usual.read_decoder(config, "solar_open", layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    usual.uniform_moe(config)
    return {
        **usual.write_decoder(config),
        **usual.write_biases(config, what="q/k/v bias"),
        **write_moe_layers(config),
        **write_balanced(config),
    }


SOLAR_OPEN = Family(
    name="solar_open",
    architecture="SolarOpenForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    harmless=("intermediate_size",),  # of dense layers, which there are none of
    read=_read,
    write=_write,
    table=(*usual.EMBEDDING, *usual.PLAIN_ATTENTION, *MOE_MLP, *usual.HEAD),
)
