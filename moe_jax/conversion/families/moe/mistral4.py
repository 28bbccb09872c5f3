"""Mistral Small 4: latent attention whose queries grow with their positions, and experts of softmax scores."""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.latent_attention import (
    LATENT_ATTENTION,
    read_latent_attention,
    write_latent_decoder,
)
from moe_jax.conversion.families.moe.usual_moe import (
    SHARED_EXPERTS,
    above_dense,
    read_moe_layers,
    write_first_dense,
    write_moe_layers,
)
from moe_jax.conversion.families.rope_keys import read_rope, write_rope
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig, QueryScaleConfig, RopeConfig, SelectionConfig

_BETA, _LENGTH, _FRACTION = "llama_4_scaling_beta", "original_max_position_embeddings", "partial_rotary_factor"
# The rotation of the published models, which a config that says nothing of it means.
_PUBLISHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    _LENGTH: 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def _read(config: HFConfig) -> ModelConfig:
    rope, scale = _read_rope(config)
    attention = read_latent_attention(config, interleaved=config.flag("rope_interleave"), rope=rope)
    layers = read_moe_layers(
        config,
        [replace(attention, query_scale=scale)] * usual.num_layers(config),
        above_dense(config),
        balance_coef=0.0,
        gate=usual.read_gate(config),
        gate_scale=config.required_number("routed_scaling_factor"),
        selection=_read_selection(config),
    )
    return usual.read_decoder(config, "mistral4", layers, rope=rope)


def _read_rope(config: HFConfig) -> tuple[RopeConfig, QueryScaleConfig | None]:
    """Reads the rotary embedding, and beside its keys how queries grow."""
    values = {**(config.mapping("rope_parameters") or {}), **(config.mapping("rope_scaling") or {})} or _PUBLISHED
    rotated, plain = (config.required_integer(f"qk_{part}_head_dim") for part in ("rope", "nope"))
    keys = {key: value for key, value in values.items() if key not in (_BETA, _FRACTION, "max_position_embeddings")}
    share = rotated / max(1, rotated + plain)
    if values.get(_FRACTION, share) != share:
        raise InputError(
            f"config.json: rope {_FRACTION} is {shown(values[_FRACTION])}, expected {share}: qk_rope_head_dim says "
            "what of a head is rotated"
        )
    theta = config.number("rope_theta")
    one = HFConfig({"rope_parameters": keys, **({} if "rope_theta" in keys else {"rope_theta": theta})}, {})
    rope = read_rope(one, max_positions=config.required_integer("max_position_embeddings"), head_dim=rotated)
    config.unknown_inside("rope_parameters", one.unread_keys().get("rope_scaling", ()))
    if rope.scaling != "yarn":
        raise InputError(f"config.json: in the format of 'mistral4' the rope type is 'yarn', and not {rope.scaling!r}")
    grows = HFConfig(values, {})
    length, beta = grows.required_integer(_LENGTH), grows.required_number(_BETA)
    return rope, None if beta == 0.0 else QueryScaleConfig(coefficient=beta, length=length)


def _read_selection(config: HFConfig) -> SelectionConfig:
    groups, best = config.required_integer("n_group"), config.required_integer("topk_group")
    # Of a single group, nothing is chosen.
    return SelectionConfig() if groups == 1 else SelectionConfig(groups=groups, top_groups=best, group_score="best_two")


def _write(config: ModelConfig) -> dict[str, Any]:
    keys = write_latent_decoder(config) | write_first_dense(config) | write_moe_layers(config)
    for key in ("rope_theta", "rope_scaling"):
        del keys[key]
    latent, scale = config.layers[0].softmax_attention.latent, config.layers[0].softmax_attention.query_scale
    scaling = write_rope(config.rope)["rope_scaling"] or {}
    keys["rope_parameters"] = {
        **scaling,
        "rope_theta": config.rope.theta,
        _BETA: 0.0 if scale is None else scale.coefficient,
        _LENGTH: config.rope.original_max_positions,
    }
    keys["rope_interleave"] = latent is not None and latent.interleaved
    if config.moe_layers:
        moe = config.moe(config.moe_layers[0])
        keys |= {
            "norm_topk_prob": moe.gate == "topk_softmax",
            "routed_scaling_factor": moe.gate_scale,
            "n_group": moe.selection.groups,
            "topk_group": moe.selection.top_groups,
        }
    return keys


MISTRAL4 = Family(
    name="mistral4",
    architecture="Mistral4ForCausalLM",
    classifier=SCORE,
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "max_position_embeddings": 1048576,
        "num_key_value_heads": 32,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 0,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    harmless=("head_dim", "qk_head_dim"),  # derived
    read=_read,
    write=_write,
    table=(
        *usual.EMBEDDING,
        *LATENT_ATTENTION,
        *usual.ROUTER,
        *usual.fused_experts("model.layers.{i}.mlp.experts"),
        *SHARED_EXPERTS,
        *usual.GATED_FFN,
        *usual.HEAD,
    ),
)
