"""MoEs in every n-th layer except for some listed ones, in the keys that Qwen2-MoE and Qwen3-MoE share."""

import math
from collections.abc import Sequence
from typing import Any

from moe_jax.conversion.families.parts.family import (
    num_layers,
    read_gated_ffn,
    same_in_all_layers,
    uniform_moe,
    write_activation,
)
from moe_jax.conversion.hf.config_keys import HFConfig
from moe_jax.core.errors import InputError
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, MoEConfig


def read_layers(
    config: HFConfig, attention: Sequence[AttentionConfig], *, shared_expert: str | None = None
) -> list[LayerConfig]:
    """Reads layers with the given attention, each with an MoE or an FFN.

    Args:
      config: the Hugging Face config.
      attention: of every layer.
      shared_expert: the key of the width of a shared expert with a sigmoid gate; None: there is none.

    Raises:
      InputError: for missing or impossible values.
    """
    moe_layers = _read_moe_layers(config)
    moe = _read_moe(config, shared_expert) if moe_layers else None
    # A width of dense layers that no layer has stays unread, and is written back.
    ffn = read_gated_ffn(config) if len(moe_layers) < num_layers(config) else None
    layers = []
    for i, one in enumerate(attention):
        mlp = moe if i in moe_layers else ffn
        assert mlp is not None
        layers.append(LayerConfig(attention=one, mlp=mlp))
    return layers


def _read_moe_layers(config: HFConfig) -> set[int]:
    """Reads the indices of the layers that are MoEs: every `decoder_sparse_step`-th, except those listed as dense."""
    step, dense = config.required_integer("decoder_sparse_step"), config.integers("mlp_only_layers", lists_only=True)
    if step < 1:
        raise InputError(f"config.json: decoder_sparse_step={step} must be at least 1")
    return set(range(step - 1, num_layers(config), step)) - set(dense)


def _read_moe(config: HFConfig, shared_expert: str | None) -> MoEConfig:
    config.require("num_experts_per_tok", "router_aux_loss_coef")
    return MoEConfig(
        expert=read_gated_ffn(config, dim="moe_intermediate_size"),
        num_experts=_read_num_experts(config),
        top_k=config.required_integer("num_experts_per_tok"),
        gate="topk_softmax" if config.flag("norm_topk_prob") else "softmax_topk",
        universal="none" if shared_expert is None else "sigmoid",
        universal_dim=None if shared_expert is None else config.required_integer(shared_expert),
        balance_coef=config.required_number("router_aux_loss_coef"),
    )


def _read_num_experts(config: HFConfig) -> int:
    """Reads `num_experts` (Transformers 4) or `num_local_experts` (Transformers 5, for some families)."""
    if not config.given("num_local_experts"):
        return config.required_integer("num_experts")
    new = config.required_integer("num_local_experts")
    if config.given("num_experts") and config.integer("num_experts") != new:
        raise InputError(
            f"config.json: num_local_experts is {new}, but num_experts is {config.integer('num_experts')}; keep one"
        )
    return new


def write_layers(config: ModelConfig, *, shared_expert: str | None = None) -> dict[str, Any]:
    """Returns the keys that `read_layers` reads.

    Raises:
      InputError: if MoEs or dense FFNs differ from each other.
    """
    dense = [i for i in range(config.num_layers) if i not in config.moe_layers]
    # The largest step that passes every MoE; without any, all layers are listed as dense.
    step = math.gcd(*(i + 1 for i in config.moe_layers)) or 1
    keys: dict[str, Any] = {
        "decoder_sparse_step": step,
        "mlp_only_layers": [i for i in dense if (i + 1) % step == 0],
    }
    if dense:
        same_in_all_layers(config, "FFN of dense layers", lambda layer: layer.mlp, among=dense)
        ffn = config.ffn(dense[0])
        keys |= {"intermediate_size": ffn.dim, "hidden_act": write_activation(ffn)}
    if config.moe_layers:
        moe = uniform_moe(config, among=config.moe_layers)
        keys |= {
            "moe_intermediate_size": moe.expert.dim,
            "hidden_act": write_activation(moe.expert),
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.gate == "topk_softmax",
            "router_aux_loss_coef": moe.balance_coef,
        }
        if shared_expert is not None:
            keys[shared_expert] = moe.universal_ffn.dim
    return keys
