"""DeepSeek-V2 and V2-Lite: latent attention, and MoEs whose experts may be chosen from the best groups of them."""

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
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.models import ModelConfig, SelectionConfig

GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"


def _read(config: HFConfig) -> ModelConfig:
    config.must_be("scoring_func", "softmax")
    config.must_be("mlp_bias", False)
    config.must_be("moe_layer_freq", 1)
    # False in all released checkpoints. If true, the code that came with them renormalises and does not scale, and
    # Transformers scales and does not renormalise.
    config.must_be("norm_topk_prob", False)
    attention = read_latent_attention(config, interleaved=True)
    layers = read_layers(
        config,
        attention,
        gate="softmax_topk",
        scale=config.required_number("routed_scaling_factor"),
        selection=_read_selection(config),
    )
    return read_decoder(config, "deepseek_v2", layers)


def _read_selection(config: HFConfig) -> SelectionConfig:
    method = config.text("topk_method")
    if method == GREEDY:
        return SelectionConfig()
    if method != IN_GROUPS:
        hint = nearest(method, (GREEDY, IN_GROUPS)) if method else ""
        raise InputError(f"config.json: unknown topk_method {shown(method)}{hint}; known: {GREEDY}, {IN_GROUPS}")
    return SelectionConfig(groups=config.required_integer("n_group"), top_groups=config.required_integer("topk_group"))


def _write(config: ModelConfig) -> dict[str, Any]:
    keys = write_latent_decoder(config) | write_layers(config)
    if config.moe_layers:
        moe = config.moe(config.moe_layers[0])
        keys |= {"routed_scaling_factor": moe.gate_scale, "topk_method": GREEDY}
        if moe.selection.groups > 1:
            groups = {"n_group": moe.selection.groups, "topk_group": moe.selection.top_groups}
            keys |= {"topk_method": IN_GROUPS, **groups}
    return keys


FAMILY = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": GREEDY,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # Only the method other than `greedy` uses groups.
    harmless=("n_group", "topk_group", *DERIVED_WIDTHS, *TRAINING_KEYS),
    read=_read,
    write=_write,
    table=(*EMBEDDING, *LATENT_ATTENTION, *MLP, *HEAD),
)
