"""Keys of config.json that say which layers have a sliding window, and which are MoEs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    num_layers,
    read_gated_ffn,
    same_in_all_layers,
    uniform_moe,
    write_activation,
)
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, MoEConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(
    config: HFConfig, *, slides: Callable[[int, int], bool] = lambda i, limit: i >= limit
) -> list[int | None]:
    """Reads the window of every layer. If windows are switched off, the keys about them stay unread.

    Args:
      config: the Hugging Face config.
      slides: whether a layer has the window, if there are no `layer_types`: from its index and `max_window_layers`.

    Raises:
      InputError: if the types of layers are not one per layer, are unknown, or ask for windows that are switched off.
    """
    count, types = num_layers(config), _read_types(config)
    if not config.flag("use_sliding_window"):
        if types is not None and SLIDING in types:
            raise InputError(f"config.json: layer_types has {SLIDING!r}, but use_sliding_window is not true")
        if types is not None:
            config.keep("layer_types", list(types))
        return [None] * count
    window = config.integer("sliding_window")
    if types is None:
        limit = config.required_integer("max_window_layers")
        types = tuple(SLIDING if slides(i, limit) else FULL for i in range(count))
    return [window if kind == SLIDING else None for kind in types]


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_windows` reads.

    Raises:
      InputError: if there are windows of several widths.
    """
    keys = write_layer_types(config)
    if "sliding_window" not in keys:
        return {"use_sliding_window": False}
    # Transformers 5 reads the types; older releases read the index of the first layer with a window.
    return {"use_sliding_window": True, **keys, "max_window_layers": keys["layer_types"].index(SLIDING)}


def read_layer_types(config: HFConfig, *, full_every: int | None) -> tuple[list[str], int | None]:
    """Reads the type of every layer, and the window of those that have one.

    Args:
      config: the Hugging Face config.
      full_every: if the types are left out, every layer with an index that this divides, counted from 1, has no window.

    Raises:
      InputError: if the types of layers are not one per layer or are unknown, or there is no window for them.
    """
    types = _read_types(config)
    if types is None:
        if full_every is None or full_every < 1:
            raise InputError(
                f"config.json: without layer_types, sliding_window_pattern={full_every} must be at least 1"
            )
        types = tuple(SLIDING if (i + 1) % full_every else FULL for i in range(num_layers(config)))
    return list(types), config.required_integer("sliding_window") if SLIDING in types else None


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_layer_types` reads; raises as `write_windows` does."""
    windows = [layer.attention.sliding_window for layer in config.layers]
    used = {window for window in windows if window is not None}
    if len(used) > 1:
        raise InputError(f"the format of {config.family!r} has one sliding window, the layers have {sorted(used)}")
    types = [FULL if window is None else SLIDING for window in windows]
    return {"layer_types": types, **({"sliding_window": used.pop()} if used else {})}


def _read_types(config: HFConfig) -> tuple[str, ...] | None:
    count, types = num_layers(config), config.texts("layer_types")
    if types is not None and (len(types) != count or not set(types) <= {FULL, SLIDING}):
        raise InputError(
            f"config.json: layer_types has {len(types)} entries {shown(sorted(set(types)))}, "
            f"expected {count} (num_hidden_layers), each {FULL!r} or {SLIDING!r}"
        )
    return types


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
