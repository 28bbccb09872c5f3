"""MiniMax-M2: q/k norms over the whole projection, a part of each head rotated, and sigmoid scores with a bias."""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import selection_bias
from moe_jax.conversion.families.rope_keys import read_rope
from moe_jax.conversion.table import FUSED, PER_EXPERT, linear
from moe_jax.core.errors import InputError
from moe_jax.models import ModelConfig, RopeConfig, SelectionConfig

# What the published config says of choices that the family has made, and that other models of the maker's have not.
_AS_PUBLISHED = {
    "attention_bias": False,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "use_qk_norm": True,
    "use_routing_bias": True,
    **dict.fromkeys((f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")), 1.0),
}


def _read(config: HFConfig) -> ModelConfig:
    for key, value in _AS_PUBLISHED.items():
        config.must_be(key, value)
    config.must_be("attn_type_list", [1] * usual.num_layers(config))
    attention = usual.read_attention(config, qk_norm="projection")
    moe = usual.read_moe(
        config,
        config.required_integer("num_local_experts"),
        gate="topk_sigmoid",
        selection=SelectionConfig(bias=True),
    )
    rope = _read_rope(config, attention.head_dim)
    return usual.read_decoder(config, "minimax_m2", usual.repeat_layers(config, attention, moe), rope=rope)


def _read_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rotary embedding; the published config says how many entries of a head are rotated, not their share."""
    max_positions = config.required_integer("max_position_embeddings")
    rope, width = read_rope(config, max_positions=max_positions, head_dim=head_dim), config.integer("rotary_dim")
    if width is None:
        return rope
    if not 0 < width <= head_dim or rope.fraction not in (1.0, width / head_dim):
        raise InputError(
            f"config.json: rotary_dim={width} must lie between 1 and head_dim={head_dim}, and agree with "
            f"partial_rotary_factor={rope.fraction}"
        )
    return replace(rope, fraction=width / head_dim)


def _write(config: ModelConfig) -> dict[str, Any]:
    moe, head_dim = usual.uniform_moe(config), config.layers[0].softmax_attention.head_dim
    width = round(head_dim * config.rope.fraction)
    return {
        **usual.write_decoder(config),
        **({"rotary_dim": width} if width / head_dim == config.rope.fraction else {}),
        **usual.write_ffn(moe.expert),
        **usual.write_moe(moe, "num_local_experts"),
        **_AS_PUBLISHED,
    }


_BIAS = {
    PER_EXPERT: "block_sparse_moe.e_score_correction_bias",
    FUSED: "mlp.e_score_correction_bias",
}

MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
    },
    # Of an FFN that no layer has, of how a shared expert would be weighted, and of layers that predict tokens after the
    # next, which published checkpoints have not.
    harmless=("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"),
    read=_read,
    write=_write,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *usual.ATTENTION,
        *linear("model.layers.{i}.block_sparse_moe.gate", "layers/{i}/mlp/router", PER_EXPERT),
        *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router", FUSED),
        *selection_bias(_BIAS),
        *usual.gated_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *usual.HEAD,
    ),
)
