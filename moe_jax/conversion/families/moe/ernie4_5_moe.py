"""ERNIE 4.5 with experts: chosen by softmax and a bias, in a range of layers; and neighbours are rotated together."""

import math
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import (
    SHARED_EXPERTS,
    check_further,
    read_moe_layers,
    renamed,
    selection_bias,
    write_moe_layers,
)
from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored
from moe_jax.core.errors import InputError
from moe_jax.models import ModelConfig, SelectionConfig

# How the family calls the keys that `usual_moe` reads and writes.
_NAMES = {
    "n_routed_experts": "moe_num_experts",
    "n_shared_experts": "moe_num_shared_experts",
    "num_experts_per_tok": "moe_k",
}
# The smallest divisor of weights is below any sum of weights that can be.
_AS_PUBLISHED = {
    "moe_norm_min": 1e-12,
    "use_bias": False,
    "use_rmsnorm": True,
    "moe_gate": "topk",
    "moe_use_aux_free": True,
}
_MTP = "of layers that predict tokens after the next, which are no part of the decoder"


def _read(config: HFConfig) -> ModelConfig:
    for key, value in _AS_PUBLISHED.items():
        config.must_be(key, value)
    check_further(config)
    attention = usual.read_attention(config, rope_interleaved=True)
    moes = _moes(config)
    layers = read_moe_layers(
        config,
        [attention] * usual.num_layers(config),
        moes,
        gate="topk_softmax",
        selection=SelectionConfig(bias=True),
        balance_coef=config.required_number("router_aux_loss_coef") if moes else 0.0,
    )
    return usual.read_decoder(config, "ernie4_5_moe", layers)


def _moes(config: HFConfig) -> list[int]:
    """Reads which layers are MoEs: every n-th from the first to the last one that may be."""
    count, step = usual.num_layers(config), config.required_integer("moe_layer_interval")
    first, last = config.required_integer("moe_layer_start_index"), config.integer("moe_layer_end_index")
    last = -1 if last is None else last
    if step < 1 or first < 0 or last < -1:
        raise InputError(
            f"config.json: moe_layer_interval={step} must be at least 1, moe_layer_start_index={first} at least 0 and "
            f"moe_layer_end_index={last} at least -1"
        )
    return [i for i in range(first, count if last == -1 else min(last + 1, count)) if (i + 1) % step == 0]


def _write(config: ModelConfig) -> dict[str, Any]:
    moes = config.moe_layers
    follow = moes == tuple(range(moes[0], moes[-1] + 1)) if moes else True
    return {
        **usual.write_decoder(config),
        "use_bias": False,
        "moe_layer_start_index": moes[0] if moes else config.num_layers,
        "moe_layer_end_index": moes[-1] if moes else -1,
        "moe_layer_interval": 1 if follow else math.gcd(*(i + 1 for i in moes)),
        **renamed(write_moe_layers(config), _NAMES),
        **({"router_aux_loss_coef": config.moe(moes[0]).balance_coef} if moes else {}),
    }


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of biases: there is a row of them for every kind of experts, and the text has one kind."""
    if not config.moe_layers:
        return {}
    shape = (1, config.moe(config.moe_layers[0]).num_experts)
    return {f"model.layers.{{i}}.{name}": shape for name in _BIAS.values()}


_BIAS = {
    PER_EXPERT: "mlp.moe_statics.e_score_correction_bias",
    FUSED: "mlp.gate.moe_statics.e_score_correction_bias",
}

ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    names=_NAMES,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "use_bias": False,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_k": 6,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    harmless=("moe_capacity",),  # of the code that it was trained with
    read=_read,
    write=_write,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *usual.PLAIN_ATTENTION,
        *usual.ROUTER,
        *selection_bias(_BIAS),
        *usual.gated_experts(),
        *SHARED_EXPERTS,
        *usual.GATED_FFN,
        *usual.HEAD,
        Ignored(r"model\.mtp_.*", _MTP),
    ),
    shapes=_shapes,
)
