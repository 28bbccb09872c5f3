"""Qwen2 and Qwen2.5: biases on queries, keys and values; optionally a sliding window on some layers."""

from typing import Any

from moe_jax.convert.families._shared import (
    ATTENTION,
    EMBEDDING,
    GATED_FFN,
    HEAD,
    Family,
    dense_ffn,
    num_layers,
    read_attention,
    read_decoder,
    read_gated_ffn,
    write_activation,
    write_decoder,
)
from moe_jax.convert.foreign_config import ForeignConfig
from moe_jax.errors import InputError, shown
from moe_jax.models import LayerConfig, ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read(config: ForeignConfig) -> ModelConfig:
    ffn = read_gated_ffn(config)
    windows = _read_windows(config)
    layers = [
        LayerConfig(attention=read_attention(config, biases=("q", "k", "v"), sliding_window=window), mlp=ffn)
        for window in windows
    ]
    return read_decoder(config, "qwen2", layers)


def _read_windows(config: ForeignConfig) -> list[int | None]:
    """One window per layer. If windows are switched off, the keys about them stay foreign."""
    count = num_layers(config)
    if not config.flag("use_sliding_window"):
        return [None] * count
    window = config.integer("sliding_window")
    types = config.texts("layer_types")
    if types is None:
        first = config.required_integer("max_window_layers")
        types = tuple(SLIDING if i >= first else FULL for i in range(count))
    if len(types) != count or not set(types) <= {FULL, SLIDING}:
        raise InputError(
            f"config.json: layer_types has {len(types)} entries {shown(sorted(set(types)))}, "
            f"expected {count} (num_hidden_layers), each {FULL!r} or {SLIDING!r}"
        )
    return [window if kind == SLIDING else None for kind in types]


def write(config: ModelConfig) -> dict[str, Any]:
    ffn = dense_ffn(config)
    keys = {**write_decoder(config), "intermediate_size": ffn.dim, "hidden_act": write_activation(ffn)}
    windows = [layer.attention.sliding_window for layer in config.layers]
    used = {window for window in windows if window is not None}
    if len(used) > 1:
        raise InputError(f"the format of 'qwen2' has one sliding window, the layers have {sorted(used)}")
    if not used:
        return {**keys, "use_sliding_window": False}
    return {
        **keys,
        "use_sliding_window": True,
        "sliding_window": used.pop(),
        # Transformers 5 reads the types; older releases read the index of the first layer with a window.
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "max_window_layers": next(i for i, window in enumerate(windows) if window is not None),
    }


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=read,
    write=write,
    table=(*EMBEDDING, *ATTENTION, *GATED_FFN, *HEAD),
)
