"""Gemma 1, 2, and the text model of 3: a scaled embedding, norms with factors of one plus their weight."""

import math
from collections.abc import Mapping
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.rope_keys import write_rope_parameters
from moe_jax.conversion.families.windows import FULL, SLIDING, read_layer_types, read_ropes, write_layer_types
from moe_jax.conversion.table import Table, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig, RopeConfig

_DEFAULTS = {
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def _read(config: HFConfig, family: str, layers: list[LayerConfig], **kwargs: Any) -> ModelConfig:
    d_model = config.required_size("hidden_size")
    # Rounded to the dtype of the activations, as in Transformers.
    return usual.read_decoder(config, family, layers, norm="rms_plus_one", embed_scale=math.sqrt(d_model), **kwargs)


def _refuse_bidirectional(config: HFConfig) -> None:
    """Raises `InputError` for encoders (EmbeddingGemma), whose tokens see those after them."""
    if config.flag("use_bidirectional_attention"):
        config.must_be("use_bidirectional_attention", False)


# --- Gemma 1: an FFN gated by the approximate GELU ------------------------------------------------


def _read_gemma(config: HFConfig) -> ModelConfig:
    _refuse_bidirectional(config)
    config.require("head_dim", "intermediate_size")
    attention = usual.read_attention(config, biases=usual.read_biases(config))
    dim = config.required_integer("intermediate_size")
    ffn = FFNConfig(dim=dim, gated=True, activation=_read_activation(config))
    return _read(config, "gemma", usual.repeat_layers(config, attention, ffn))


def _read_activation(config: HFConfig) -> Any:
    """Reads `hidden_act`, in which the first configs said "gelu" and meant the approximate one."""
    found = "gelu_tanh" if config.text("hidden_act") == "gelu" else usual.read_activation(config)
    # Transformers 4 reads this key if it is given, Transformers 5 does not.
    if config.given("hidden_activation") and usual.read_activation(config, "hidden_activation") != found:
        raise InputError(
            f"config.json: hidden_act is {shown(config.text('hidden_act'))}, but hidden_activation is "
            f"{shown(config.text('hidden_activation'))}; keep one"
        )
    config.text("hidden_activation")
    return found


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    keys = usual.write_dense(config)
    return {**keys, "hidden_activation": keys["hidden_act"], **usual.write_biases(config)}


GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    classifier=SCORE,
    defaults={**_DEFAULTS, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    read=_read_gemma,
    write=_write_gemma,
    table=(*usual.EMBEDDING, *usual.PLAIN_ATTENTION, *usual.GATED_FFN, *usual.HEAD),
)

# --- Gemma 2 and 3: four norms in a layer, a scale of scores, windows on some layers --------------

_FOUR_NORMS: Table = (
    *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
    *usual.PROJECTIONS,
    *usual.QK_NORMS,
    *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/attention_output_norm"),
    *norm("model.layers.{i}.pre_feedforward_layernorm", "layers/{i}/mlp_norm"),
    *norm("model.layers.{i}.post_feedforward_layernorm", "layers/{i}/mlp_output_norm"),
)


def _read_layers(
    config: HFConfig, full_every: int | None, ropes: Mapping[str, RopeConfig | None], **kwargs: Any
) -> list[LayerConfig]:
    """Reads layers of two types, with a rotary embedding for each; further keywords are for the attention of all.

    If the types are left out, every layer with an index that `full_every` divides, counted from 1, has no window.
    """
    _refuse_bidirectional(config)
    config.require("head_dim")
    types = read_layer_types(config)
    if types is None:
        if full_every is None or full_every < 1:
            raise InputError(
                f"config.json: without layer_types, sliding_window_pattern={full_every} must be at least 1"
            )
        types = tuple(SLIDING if (i + 1) % full_every else FULL for i in range(usual.num_layers(config)))
    windows = {FULL: None, SLIDING: config.required_integer("sliding_window") if SLIDING in types else None}
    same: dict[str, Any] = {"biases": usual.read_biases(config), "scale": _read_scale(config), **kwargs}
    attention = {
        kind: usual.read_attention(config, **same, sliding_window=window, rope=ropes.get(kind))
        for kind, window in windows.items()
    }
    ffn = usual.read_gated_ffn(config, activation="hidden_activation")
    return [LayerConfig(attention=attention[kind], mlp=ffn, norm_position="both") for kind in types]


def _read_scale(config: HFConfig) -> float:
    """Reads the scale of attention scores: `query_pre_attn_scalar` to the power of -1/2."""
    scalar = config.required_number("query_pre_attn_scalar")
    if scalar <= 0:
        raise InputError(f"config.json: query_pre_attn_scalar={scalar} must be above 0")
    return scalar**-0.5


def _write_scale(config: ModelConfig) -> dict[str, Any]:
    """Returns the key that `_read_scale` reads: an integer, as in all checkpoints, if one gives exactly this scale."""
    scale, head_dim = usual.same_attention(
        config, "scale of scores", lambda attention: (attention.scale, attention.head_dim)
    )
    scalar = head_dim if scale is None else scale**-2
    nearest = round(scalar)
    return {"query_pre_attn_scalar": nearest if nearest and nearest**-0.5 == scale else scalar}


def _write_four_norms(config: ModelConfig) -> dict[str, Any]:
    dense = usual.write_dense(config, activation="hidden_activation")
    return dense | usual.write_biases(config) | _write_scale(config)


# --- Gemma 2: soft caps on scores and logits, a window on every second layer ----------------------


def _read_gemma2(config: HFConfig) -> ModelConfig:
    layers = _read_layers(config, 2, {}, score_soft_cap=config.number("attn_logit_softcapping"))
    return _read(config, "gemma2", layers, logit_soft_cap=config.number("final_logit_softcapping"))


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    caps = "soft cap on scores"
    return {
        **_write_four_norms(config),
        "attn_logit_softcapping": usual.same_attention(config, caps, lambda attention: attention.score_soft_cap),
        "final_logit_softcapping": config.logit_soft_cap,
        **write_layer_types(config),
    }


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    classifier=SCORE,
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    # Transformers reads the activation and the window from other keys.
    harmless=("cache_implementation", "hidden_act", "sliding_window_size"),
    read=_read_gemma2,
    write=_write_gemma2,
    table=(*usual.EMBEDDING, *_FOUR_NORMS, *usual.GATED_FFN, *usual.HEAD),
)

# --- Gemma 3: q/k norm per head; most layers have a window and a rotary embedding of their own ----


def _read_gemma3(config: HFConfig) -> ModelConfig:
    # Transformers reads it, and does not apply it.
    config.must_be("attn_logit_softcapping", None)
    ropes = read_ropes(config, {FULL: "rope_theta", SLIDING: "rope_local_base_freq"})
    every = config.integer("sliding_window_pattern")
    layers = _read_layers(config, every, {SLIDING: ropes[SLIDING]}, qk_norm="head")
    soft_cap = config.number("final_logit_softcapping")
    return _read(config, "gemma3_text", layers, rope=ropes[FULL], logit_soft_cap=soft_cap)


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    final = {"final_logit_softcapping": config.logit_soft_cap}
    keys = {**_write_four_norms(config), **final, **write_layer_types(config)}
    types = keys["layer_types"]
    if "type" in (keys["rope_scaling"] or {}):
        # All releases that read the family know the newer name, and the newest ignores the older one.
        keys["rope_scaling"] = {"rope_type": keys["rope_scaling"].pop("type"), **keys["rope_scaling"]}
    if SLIDING in types:
        sliding = [i for i, kind in enumerate(types) if kind == SLIDING]
        local = usual.same_in_all_layers(config, "rotary embedding of windows", config.rope_of, among=sliding)
        keys["rope_local_base_freq"] = local.theta
        if local.scaling != "none":  # which only Transformers 5 has, in its own style
            keys["rope_parameters"] = {FULL: write_rope_parameters(config.rope), SLIDING: write_rope_parameters(local)}
    # Releases before 4.53 know no types of layers; in them every n-th layer is without a window.
    every = types.index(FULL) + 1 if FULL in types else len(types) + 1
    if types == [SLIDING if (i + 1) % every else FULL for i in range(len(types))]:
        keys["sliding_window_pattern"] = every
    return keys


GEMMA3_TEXT = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    classifier=SCORE,
    defaults={
        **_DEFAULTS,
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
    read=_read_gemma3,
    write=_write_gemma3,
    table=GEMMA2.table,
)
