"""Sliding windows on some layers, in the keys that Qwen2 and Qwen3 share."""

from typing import Any

from moe_jax.convert.families._shared import num_layers
from moe_jax.convert.foreign_config import ForeignConfig
from moe_jax.errors import InputError, shown
from moe_jax.models import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(config: ForeignConfig) -> list[int | None]:
    """One window per layer. If windows are switched off, the keys about them stay foreign.

    Raises:
      InputError: if the types of layers are not one per layer, are unknown, or ask for windows that are switched off.
    """
    count = num_layers(config)
    types = config.texts("layer_types")
    if types is not None and (len(types) != count or not set(types) <= {FULL, SLIDING}):
        raise InputError(
            f"config.json: layer_types has {len(types)} entries {shown(sorted(set(types)))}, "
            f"expected {count} (num_hidden_layers), each {FULL!r} or {SLIDING!r}"
        )
    if not config.flag("use_sliding_window"):
        if types is not None and SLIDING in types:
            raise InputError(f"config.json: layer_types has {SLIDING!r}, but use_sliding_window is not true")
        if types is not None:
            config.keep("layer_types", list(types))
        return [None] * count
    window = config.integer("sliding_window")
    if types is None:
        first = config.required_integer("max_window_layers")
        types = tuple(SLIDING if i >= first else FULL for i in range(count))
    return [window if kind == SLIDING else None for kind in types]


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_windows` reads.

    Raises:
      InputError: if there are windows of several widths.
    """
    windows = [layer.attention.sliding_window for layer in config.layers]
    used = {window for window in windows if window is not None}
    if len(used) > 1:
        raise InputError(f"the format of {config.family!r} has one sliding window, the layers have {sorted(used)}")
    if not used:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": used.pop(),
        # Transformers 5 reads the types; older releases read the index of the first layer with a window.
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "max_window_layers": next(i for i, window in enumerate(windows) if window is not None),
    }
