"""Sliding windows of layers, and layers that rotate nothing, as keys of config.json say them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.rope_keys import read_rope
from moe_jax.conversion.families.usual import num_layers, read_attention, same_attention
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig, RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"
UNROTATED = RopeConfig(fraction=0.0)
"""The rotary embedding of layers that have none, in models whose other layers have one."""


def read_layer_types(config: HFConfig, other: str = SLIDING) -> tuple[str, ...] | None:
    """Reads `FULL` or `other` for every layer; None: the config does not say."""
    count, types = num_layers(config), config.texts("layer_types")
    if types is not None and (len(types) != count or not set(types) <= {FULL, other}):
        raise InputError(
            f"config.json: layer_types has {len(types)} entries {shown(sorted(set(types)))}, "
            f"expected {count} (num_hidden_layers), each {FULL!r} or {other!r}"
        )
    return types


def read_windows(config: HFConfig, *, slides: Callable[[int], bool]) -> list[int | None]:
    """Reads the window of every layer from `layer_types` and `sliding_window`.

    Without types, a layer has the window if `slides(its index)`; without a window, none has. Types that then have no
    effect are written back.
    """
    types, window = read_layer_types(config), config.integer("sliding_window")
    if window is None:
        if types is not None:
            config.keep("layer_types", list(types))
        return [None] * num_layers(config)
    if types is None:
        types = tuple(SLIDING if slides(i) else FULL for i in range(num_layers(config)))
    return [window if kind == SLIDING else None for kind in types]


def slides_but_every(config: HFConfig, key: str, default: int | None = None) -> Callable[[int], bool]:
    """Reads the key of a number n, which the family may have a default for: all layers have a window but every n-th.

    Raises:
      InputError: if it is below 1.
    """
    every = config.required_integer(key) if default is None or config.given(key) else default
    if every < 1:
        raise InputError(f"config.json: {key}={every} must be at least 1")
    return lambda i: (i + 1) % every != 0


def ropes_of_windows(windows: Sequence[int | None]) -> list[RopeConfig | None]:
    """Returns the rotary embeddings of layers of which only those with a window rotate anything."""
    return [UNROTATED if window is None else None for window in windows]


def read_rotating(config: HFConfig) -> list[bool]:
    """Reads which layers rotate: 1 in `no_rope_layers`, or all but every n-th."""
    count, listed = num_layers(config), config.integers("no_rope_layers", lists_only=True)
    if not listed:
        every = config.required_integer("no_rope_layer_interval")
        if every < 1:
            raise InputError(f"config.json: no_rope_layer_interval={every} must be at least 1")
        return [(i + 1) % every != 0 for i in range(count)]
    if len(listed) != count or not set(listed) <= {0, 1}:
        raise InputError(
            f"config.json: no_rope_layers has {len(listed)} entries, expected {count} (num_hidden_layers), each 0 or 1"
        )
    return [bool(one) for one in listed]


def read_ropes(config: HFConfig, thetas: Mapping[str, str]) -> dict[str, RopeConfig]:
    """Reads the rotary embedding of layers of either type.

    Transformers 5 writes `rope_parameters` with an object for each type; Transformers 4 writes `rope_scaling` for
    layers without a window, and for each type the key in `thetas`.
    """
    by_type = config.mapping("rope_parameters") or {}
    if not by_type.keys() <= {FULL, SLIDING} or not all(isinstance(one, dict | None) for one in by_type.values()):
        raise InputError(
            f"config.json: rope_parameters has {shown(sorted(by_type))}, expected objects for {FULL!r} and {SLIDING!r}"
        )
    scalings = {FULL: config.mapping("rope_scaling"), SLIDING: None}
    ropes = {}
    for kind, key in thetas.items():
        parts: dict[str, Any] = {"rope_scaling": scalings[kind], "rope_parameters": by_type.get(kind)}
        if config.given(key):
            parts["rope_theta"] = config.number(key)
        one = HFConfig(parts, {"rope_theta": config.number(key)})
        ropes[kind] = read_rope(
            one,
            max_positions=config.required_integer("max_position_embeddings"),
            head_dim=read_attention(config).head_dim,
        )
        config.unknown_inside(f"rope_parameters.{kind}", one.unread_keys().get("rope_scaling", ()))
    return ropes


def write_window(config: ModelConfig) -> dict[str, Any]:
    """Writes the sliding window of families in which all layers have it or none."""
    return {"sliding_window": same_attention(config, "sliding window", lambda attention: attention.sliding_window)}


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    """Writes the type of every layer, and the window of those that have one, which must be of one width."""
    windows = [layer.softmax_attention.sliding_window for layer in config.layers]
    used = {window for window in windows if window is not None}
    if len(used) > 1:
        raise InputError(f"the format of {config.family!r} has one sliding window, the layers have {sorted(used)}")
    types = [FULL if window is None else SLIDING for window in windows]
    return {"layer_types": types, **({"sliding_window": used.pop()} if used else {})}
