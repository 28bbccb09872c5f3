"""Granite 4: Mamba-2 in most layers, attention that may rotate nothing in the others; dense, or MoEs beside an FFN."""

import math
from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig, is_integer
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.dense.granite import (
    FACTORS,
    MOE,
    read_experts,
    read_factors,
    shared_ffn,
    write_factors,
)
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.hybrid.mamba2_layers import beside_mamba, mamba_rows, mamba_shapes
from moe_jax.conversion.families.rope_keys import read_rope
from moe_jax.conversion.table import norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, Mamba2Config, ModelConfig, MoEConfig, RopeConfig

# Published configs have the first of these names, which Transformers 5 reads as the second.
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")
_SHARED = "shared_intermediate_size"
# Steps of any size, as Transformers 5 and 4 write it. Its code for one token and for several differ on other limits.
_ANY_STEP = [0.0, {"__float__": "Infinity"}], [0.0, math.inf]

# --- keys -----------------------------------------------------------------------------------------


def _read(config: HFConfig) -> ModelConfig:
    embedding, scale, residual, logits = read_factors(config)
    attention = usual.read_attention(config, biases=usual.read_biases(config), scale=scale)
    mamba, mlp = _read_mamba(config), _read_mlp(config)
    mixers: list[AttentionConfig | Mamba2Config] = [
        mamba if kind in _MAMBA else attention for kind in _read_types(config)
    ]
    layers = [LayerConfig(attention=one, mlp=mlp, residual_scale=residual) for one in mixers]
    rope = _read_rope(config, attention.head_dim)
    return usual.read_decoder(
        config, "granitemoehybrid", layers, rope=rope, embed_scale=embedding, logit_scale=1 / logits
    )


def _read_types(config: HFConfig) -> tuple[str, ...]:
    config.require("layer_types")
    count, types = usual.num_layers(config), config.texts("layer_types") or ()
    if len(types) != count or not {*types} <= {*_MAMBA, *_ATTENTION} or not {*types} & {*_ATTENTION}:
        raise InputError(
            f"config.json: layer_types has {len(types)} entries {shown(sorted(set(types)))}, expected {count} "
            f"(num_hidden_layers), each {_MAMBA[0]!r} or {_ATTENTION[0]!r}, and at least one of the latter"
        )
    return types


def _read_mamba(config: HFConfig) -> Mamba2Config:
    # The convolutions have this activation too.
    config.must_be("hidden_act", "silu")
    config.must_be("time_step_limit", *_ANY_STEP)
    heads = config.required_integer("mamba_n_heads")
    width = config.required_integer("mamba_expand") * config.required_size("hidden_size")
    given = config.given_among(["mamba_d_head"]).get("mamba_d_head", "auto")
    if given != "auto" and not is_integer(given):
        raise InputError(f"config.json: 'mamba_d_head' is {shown(given)}, expected an integer or 'auto'")
    head_dim = width // max(heads, 1) if given == "auto" else given
    if heads * head_dim != width:
        raise InputError(
            f"config.json: mamba_n_heads={heads} of mamba_d_head={head_dim} are not mamba_expand times hidden_size = "
            f"{width} wide"
        )
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=config.required_integer("mamba_n_groups"),
        state_dim=config.required_integer("mamba_d_state"),
        conv_width=config.required_integer("mamba_d_conv"),
        conv_bias=config.flag("mamba_conv_bias"),
        bias=config.flag("mamba_proj_bias"),
        norm_eps=config.required_number("rms_norm_eps"),
    )


def _read_mlp(config: HFConfig) -> FFNConfig | MoEConfig:
    """Reads the FFN of all layers: the one that is beside the experts, where there are any."""
    if not config.integer("num_local_experts"):
        return usual.read_gated_ffn(config, dim=_SHARED)
    return read_experts(config, universal="one", universal_dim=config.required_integer(_SHARED))


def _read_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    max_positions, kind = config.required_integer("max_position_embeddings"), config.text("position_embedding_type")
    rope = read_rope(config, max_positions=max_positions, head_dim=head_dim)
    if kind not in (None, "nope", "rope"):
        raise InputError(f"config.json: unknown position_embedding_type {shown(kind)}; known: 'nope', 'rope'")
    return rope if kind == "rope" else replace(rope, fraction=0.0)


def _write(config: ModelConfig) -> dict[str, Any]:
    if not config.softmax_layers:
        raise InputError(f"in the format of {config.family!r} at least one layer has attention")
    keys = usual.write_decoder(config)
    if not config.rope.fraction:
        del keys["partial_rotary_factor"]
    return {
        **keys,
        **usual.write_biases(config),
        **write_factors(config),
        **_write_mlp(config),
        "position_embedding_type": "rope" if config.rope.fraction else "nope",
        "layer_types": [_MAMBA[0] if layer.is_recurrent else _ATTENTION[0] for layer in config.layers],
        **_write_mamba(config),
    }


def _write_mamba(config: ModelConfig) -> dict[str, Any]:
    if not config.recurrent_layers:
        # Transformers wants heads that fit the width of the model even where no layer has them.
        return {"mamba_n_heads": 1, "mamba_expand": 1}
    mamba = usual.same_in_all_layers(config, "Mamba-2", lambda layer: layer.attention, among=config.recurrent_layers)
    if not isinstance(mamba, Mamba2Config):
        raise InputError(f"the format of {config.family!r} has Mamba-2, not a {mamba.describe()}")
    return {
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.num_groups,
        "mamba_d_state": mamba.state_dim,
        "mamba_d_conv": mamba.conv_width,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.bias,
        "mamba_expand": mamba.num_heads * mamba.head_dim // config.d_model,
    }


def _write_mlp(config: ModelConfig) -> dict[str, Any]:
    if not config.moe_layers:
        ffn = usual.dense_ffn(config)
        return {"hidden_act": usual.write_activation(ffn), _SHARED: ffn.dim, "num_local_experts": 0}
    moe = usual.uniform_moe(config)
    if not moe.universal_beside:
        raise InputError(f"in the format of {config.family!r} an FFN stands beside the experts, and here is none")
    experts = {**usual.write_ffn(moe.expert), **usual.write_moe(moe, "num_local_experts")}
    return {**experts, _SHARED: moe.universal_ffn.dim}


# --- tensors --------------------------------------------------------------------------------------

_THEIRS = "model.layers.{i}.mamba"

GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        **dict.fromkeys(FACTORS, 1.0),
        "intermediate_size": 11008,
        _SHARED: 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # How the scan is cut into pieces; and words for what other keys, and these layers, say.
    harmless=("mamba_chunk_size", "normalization_function", "init_method"),
    read=_read,
    write=_write,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
        *beside_mamba(usual.PROJECTIONS),
        *mamba_rows(_THEIRS),
        *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
        *MOE,
        *shared_ffn("layers/{i}/mlp/universal"),
        *shared_ffn("layers/{i}/mlp"),
        *usual.HEAD,
    ),
    shapes=lambda config: mamba_shapes(config, _THEIRS),
    recurrent=True,
)
