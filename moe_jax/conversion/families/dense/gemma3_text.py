"""Gemma 3, its text model: q/k norm per head; most layers have a window and a rotary embedding of their own."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    EMBEDDING,
    GATED_FFN,
    HEAD,
    SCORE,
    Family,
    dense_ffn,
    read_attention,
    read_decoder,
    read_gated_ffn,
    same_in_all_layers,
    write_activation,
    write_decoder,
)
from moe_jax.conversion.families.parts.gemma_norms import (
    DEFAULTS,
    FOUR_NORMS,
    read_biases,
    read_embed_scale,
    read_scale,
    refuse_bidirectional,
    write_biases,
    write_scale,
)
from moe_jax.conversion.families.parts.rope_keys import read_rope
from moe_jax.conversion.families.parts.which_layers import FULL, SLIDING, read_layer_types, write_layer_types
from moe_jax.core.errors import InputError, shown
from moe_jax.models import LayerConfig, ModelConfig, RopeConfig


def _read(config: HFConfig) -> ModelConfig:
    refuse_bidirectional(config)
    # Transformers reads it, and does not apply it.
    config.must_be("attn_logit_softcapping", None)
    config.require("head_dim")
    types, window = read_layer_types(config, full_every=config.integer("sliding_window_pattern"))
    ropes = _read_ropes(config)
    biases, scale = read_biases(config), read_scale(config)
    ffn = read_gated_ffn(config, activation="hidden_activation")
    layers = [
        LayerConfig(
            attention=read_attention(
                config,
                biases=biases,
                qk_norm="head",
                scale=scale,
                sliding_window=window if kind == SLIDING else None,
                rope=ropes[SLIDING] if kind == SLIDING else None,
            ),
            mlp=ffn,
            norm_position="both",
        )
        for kind in types
    ]
    return read_decoder(
        config,
        "gemma3_text",
        layers,
        norm="rms_plus_one",
        rope=ropes[FULL],
        embed_scale=read_embed_scale(config),
        logit_soft_cap=config.number("final_logit_softcapping"),
    )


def _read_ropes(config: HFConfig) -> dict[str, RopeConfig]:
    """Reads the rotary embedding of either type of layers.

    Transformers 5 writes `rope_parameters` with an object for each type; Transformers 4 writes `rope_theta` and
    `rope_scaling` for layers without a window, and `rope_local_base_freq` for those with one.

    Raises:
      InputError: if the parameters are not given by type of layer, or are not those of a rotary embedding.
    """
    by_type = config.mapping("rope_parameters") or {}
    if not by_type.keys() <= {FULL, SLIDING} or not all(isinstance(one, dict | None) for one in by_type.values()):
        raise InputError(
            f"config.json: rope_parameters has {shown(sorted(by_type))}, expected objects for {FULL!r} and {SLIDING!r}"
        )
    thetas = {FULL: ("rope_theta", config.mapping("rope_scaling")), SLIDING: ("rope_local_base_freq", None)}
    ropes = {}
    for kind, (key, scaling) in thetas.items():
        parts: dict[str, Any] = {"rope_scaling": scaling, "rope_parameters": by_type.get(kind)}
        if config.given(key):
            parts["rope_theta"] = config.number(key)
        one = HFConfig(parts, {"rope_theta": config.number(key)})
        ropes[kind] = read_rope(
            one,
            max_positions=config.required_integer("max_position_embeddings"),
            head_dim=config.required_integer("head_dim"),
        )
        config.unknown_inside(f"rope_parameters.{kind}", one.unread_keys().get("rope_scaling", ()))
    return ropes


def _write(config: ModelConfig) -> dict[str, Any]:
    ffn, windows = dense_ffn(config), write_layer_types(config)
    types = windows["layer_types"]
    keys = {
        **write_decoder(config),
        "intermediate_size": ffn.dim,
        "hidden_activation": write_activation(ffn),
        **write_biases(config),
        **write_scale(config),
        "final_logit_softcapping": config.logit_soft_cap,
        **windows,
    }
    if "type" in (keys["rope_scaling"] or {}):
        # All releases that read the family know the newer name, and the newest ignores the older one.
        keys["rope_scaling"] = {"rope_type": keys["rope_scaling"].pop("type"), **keys["rope_scaling"]}
    if SLIDING in types:
        sliding = [i for i, kind in enumerate(types) if kind == SLIDING]
        local = same_in_all_layers(config, "rotary embedding of windows", config.rope_of, among=sliding)
        keys["rope_local_base_freq"] = local.theta
    # Releases before 4.53 know no types of layers; in them every n-th layer is without a window.
    every = types.index(FULL) + 1 if FULL in types else len(types) + 1
    if types == [SLIDING if (i + 1) % every else FULL for i in range(len(types))]:
        keys["sliding_window_pattern"] = every
    return keys


FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    classifier=SCORE,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    # Transformers reads the activation from another key.
    harmless=("cache_implementation", "hidden_act"),
    read=_read,
    write=_write,
    table=(*EMBEDDING, *FOUR_NORMS, *GATED_FFN, *HEAD),
)
