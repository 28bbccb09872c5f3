"""Sliding windows on some layers: in the keys of Qwen2, Qwen2-MoE and Qwen3, and in those of Gemma 2 and 3."""

from collections.abc import Callable
from typing import Any

from moe_jax.conversion.families.parts.family import num_layers
from moe_jax.conversion.hf.config_keys import HFConfig
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig

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
