"""GLM-4.5 to 4.7: half of each head rotated, perhaps q/k norms, and DeepSeek-V3's choice of experts."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import (
    FURTHER,
    MOE_MLP,
    above_dense,
    check_further,
    read_balanced,
    read_moe_layers,
    write_balanced,
    write_first_dense,
    write_moe_layers,
)
from moe_jax.models import ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    check_further(config)
    attention = usual.read_attention(
        config,
        biases=usual.read_biases(config, projections=("q", "k", "v")),
        qk_norm="head" if config.flag("use_qk_norm") else "none",
    )
    every = [attention] * usual.num_layers(config)
    # The published code has no balance loss.
    layers = read_moe_layers(config, every, above_dense(config), balance_coef=0.0, **read_balanced(config))
    return usual.read_decoder(config, "glm4_moe", layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **usual.write_decoder(config),
        # Left out, it would mean one half, and not the whole head as in other families.
        "partial_rotary_factor": config.rope.fraction,
        **usual.write_biases(config, what="q/k/v bias"),
        "use_qk_norm": usual.same_in_all_layers(config, "q/k norm", lambda layer: layer.attention.qk_norm) != "none",
        **write_first_dense(config),
        **write_moe_layers(config),
        **write_balanced(config),
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "use_qk_norm": False,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    read=_read,
    write=_write,
    table=(*usual.EMBEDDING, *usual.ATTENTION, *MOE_MLP, *usual.HEAD),
    further=FURTHER,
)
