"""Qwen3-Next: the gated delta rule in most layers, gated attention in the others, and MoEs with a shared expert."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.dense.qwen2 import SHARED_EXPERT as SHARED_EXPERT_DIM
from moe_jax.conversion.families.dense.qwen2 import read_sparse_layers, write_sparse_layers
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.hybrid.delta_rule_layers import (
    DEFAULTS,
    FURTHER,
    HARMLESS,
    SHARED_EXPERT,
    groups_of_key_heads,
    groups_of_queries,
    joined,
    mixers,
    read_mixers,
    shapes,
    write_mixers,
)
from moe_jax.models import ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    layers = read_sparse_layers(config, read_mixers(config), shared_expert=SHARED_EXPERT_DIM)
    return usual.read_decoder(config, "qwen3_next", layers, norm="rms_plus_one")


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_mixers(config),
        **usual.write_decoder(config),
        "partial_rotary_factor": config.rope.fraction,
        **write_sparse_layers(config, shared_expert=SHARED_EXPERT_DIM),
    }


QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        SHARED_EXPERT_DIM: 512,
        "num_experts": 512,
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    harmless=HARMLESS,
    read=_read,
    write=_write,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *mixers(joined("in_proj_qkvz", "q", "k", "v", "gate"), joined("in_proj_ba", "beta", "decay")),
        *SHARED_EXPERT,
        *usual.GATED_FFN,
        *usual.HEAD,
        FURTHER,
    ),
    universal="sigmoid",
    shapes=shapes,
    groups=lambda config: {
        **groups_of_queries(config),
        **groups_of_key_heads(config, "in_proj_qkvz", "in_proj_ba"),
    },
    recurrent=True,
)
