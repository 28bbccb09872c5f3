"""GLM-4.5 to 4.7: half of each head rotated, perhaps q/k norms, and DeepSeek-V3's choice of experts.

GLM-4.7-Flash has latent attention, and is a DeepSeek-V3 but for the names of its keys.
"""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.latent_attention import (
    LATENT_ATTENTION,
    read_latent_attention,
    write_latent_decoder,
)
from moe_jax.conversion.families.moe.usual_moe import (
    FURTHER,
    MOE_MLP,
    above_dense,
    check_further,
    listed_as_sparse,
    read_balanced,
    read_moe_layers,
    write_balanced,
    write_first_dense,
    write_moe_layers,
    write_sparse,
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
        "use_qk_norm": usual.same_attention(config, "q/k norm", lambda attention: attention.qk_norm) != "none",
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
    further_form="deepseek",
)

# --- GLM-4.7-Flash: latent attention, and a list of the layers that are MoEs ----------------------


def _read_lite(config: HFConfig) -> ModelConfig:
    check_further(config)
    attention = read_latent_attention(config, interleaved=config.flag("rope_interleave"))
    moes, count = listed_as_sparse(config), usual.num_layers(config)
    if moes is None:
        config.must_be("first_k_dense_replace", 1)
        moes = range(1, count)
    layers = read_moe_layers(config, [attention] * count, moes, balance_coef=0.0, **read_balanced(config))
    return usual.read_decoder(config, "glm4_moe_lite", layers)


def _write_lite(config: ModelConfig) -> dict[str, Any]:
    latent = config.layers[0].softmax_attention.latent
    return {
        **write_latent_decoder(config),
        "rope_interleave": latent is not None and latent.interleaved,
        **write_sparse(config),
        **write_moe_layers(config),
        **write_balanced(config),
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "rope_interleave": True,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    harmless=("head_dim", "qk_head_dim"),  # derived, and not read
    read=_read_lite,
    write=_write_lite,
    table=(*usual.EMBEDDING, *LATENT_ATTENTION, *MOE_MLP, *usual.HEAD),
    further=FURTHER,
    further_form="deepseek",
)
