"""DeepSeek-V3: latent attention, and sigmoid scores with a selection bias, which keeps experts in balance."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.deepseek_moes import (
    DERIVED_WIDTHS,
    LATENT_ATTENTION,
    MLP,
    TRAINING_KEYS,
    read_latent_attention,
    read_layers,
    write_latent_decoder,
    write_layers,
)
from moe_jax.conversion.families.parts.family import EMBEDDING, HEAD, Family, read_decoder
from moe_jax.conversion.table import Ignored
from moe_jax.models import ModelConfig, SelectionConfig


def _read(config: HFConfig) -> ModelConfig:
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    config.must_be("moe_layer_freq", 1)
    # The number of layers that predict further tokens: they are left out.
    config.integer("num_nextn_predict_layers")
    config.integer("num_mtp_layers")
    attention = read_latent_attention(config, interleaved=config.flag("rope_interleave"))
    layers = read_layers(
        config,
        attention,
        gate="topk_sigmoid" if config.flag("norm_topk_prob") else "sigmoid_topk",
        scale=config.required_number("routed_scaling_factor"),
        selection=SelectionConfig(
            bias=True,
            groups=config.required_integer("n_group"),
            top_groups=config.required_integer("topk_group"),
            group_score="best_two",
        ),
    )
    return read_decoder(config, "deepseek_v3", layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    latent = config.layers[0].attention.latent
    keys = write_latent_decoder(config) | write_layers(config)
    keys |= {"rope_interleave": latent is not None and latent.interleaved, "num_nextn_predict_layers": 0}
    if config.moe_layers:
        moe = config.moe(config.moe_layers[0])
        keys |= {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": moe.gate == "topk_sigmoid",
            "routed_scaling_factor": moe.gate_scale,
            "n_group": moe.selection.groups,
            "topk_group": moe.selection.top_groups,
        }
    return keys


FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "attention_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    harmless=(*DERIVED_WIDTHS, *TRAINING_KEYS),
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *LATENT_ATTENTION,
        *MLP,
        *HEAD,
        # In the released checkpoint, the index after its last layer; Transformers also leaves it out by this name.
        Ignored(r"model\.layers\.61\..*", "the layer that predicts a second token, which is no part of the decoder"),
    ),
)
