"""SmolLM3: Llama of which every fourth layer rotates nothing."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.windows import SLIDING, UNROTATED, read_layer_types, read_rotating, write_layer_types
from moe_jax.models import LayerConfig, ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    biases, rotates = usual.read_biases(config), read_rotating(config)
    windows = _read_windows(config, rotates)
    ffn = usual.read_gated_ffn(config, bias=config.flag("mlp_bias"))
    layers = [
        LayerConfig(
            attention=usual.read_attention(
                config, biases=biases, sliding_window=window, rope=None if rotating else UNROTATED
            ),
            mlp=ffn,
        )
        for window, rotating in zip(windows, rotates, strict=True)
    ]
    return usual.read_decoder(config, "smollm3", layers)


def _read_windows(config: HFConfig, rotates: list[bool]) -> list[int | None]:
    """Reads the window of every layer: without types, of those that do not rotate, and only if windows are in use."""
    types, window = read_layer_types(config), config.integer("sliding_window")
    if not config.flag("use_sliding_window") or window is None:
        for key, value in (("layer_types", types and list(types)), ("sliding_window", window)):
            if value is not None:
                config.keep(key, value)
        return [None] * len(rotates)
    slides = [not one for one in rotates] if types is None else [kind == SLIDING for kind in types]
    return [window if one else None for one in slides]


def _write(config: ModelConfig) -> dict[str, Any]:
    types = write_layer_types(config)
    windows = {"use_sliding_window": True, **types} if "sliding_window" in types else {"use_sliding_window": False}
    return {
        **usual.write_dense(config),
        **usual.write_biases(config),
        "mlp_bias": config.ffn(0).bias,
        "no_rope_layers": [int(layer.softmax_attention.rope is None) for layer in config.layers],
        **windows,
    }


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    classifier=SCORE,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2000000.0,
        "num_key_value_heads": 4,
        "intermediate_size": 11008,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    harmless=("max_window_layers",),
    read=_read,
    write=_write,
    table=(*usual.EMBEDDING, *usual.PLAIN_ATTENTION, *usual.GATED_FFN, *usual.HEAD),
)
