"""The architectures of Gemma 1, 2 and 3 in GGUF files: norms hold 1 + their weight, and the output is the embedding."""

from collections.abc import Mapping
from typing import Any

from moe_jax.conversion.gguf.architectures.gguf_description import (
    ATTENTION,
    EMBEDDING_ROW,
    FFN,
    HEAD,
    OUTPUT_BIAS,
    RMS_NORM,
    TIED_HEAD,
    Architecture,
    Metadata,
)
from moe_jax.conversion.table import Table, norm
from moe_jax.core.errors import InputError
from moe_jax.models import ModelConfig

_ACTIVATION = "gelu_pytorch_tanh"
# Of these many layers are the models of 27 billion parameters, whose scores are scaled by the width of the model.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}

_POST_NORMS: Table = (
    *norm("blk.{i}.post_attention_norm", "layers/{i}/attention_output_norm"),
    *norm("blk.{i}.post_ffw_norm", "layers/{i}/mlp_output_norm"),
)


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return {"model_type": "gemma", "hidden_act": _ACTIVATION, "attention_bias": metadata.has("attn_q.bias")}


def _with_four_norms(metadata: Metadata, family: str) -> dict[str, Any]:
    d_model, heads = metadata.number("embedding_length"), metadata.number("attention.head_count")
    is_27b = metadata.number("block_count") == _LAYERS_OF_27B[family] and heads
    return {
        "model_type": family,
        "hidden_activation": _ACTIVATION,
        "attention_bias": metadata.has("attn_q.bias"),
        "query_pre_attn_scalar": d_model // heads if is_27b else metadata.number("attention.key_length"),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_with_four_norms(metadata, "gemma2"),
        "sliding_window": metadata.number("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _of_gemma2(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    caps = {name: keys[name] for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if None in caps.values() or "sliding_window" not in keys:
        raise InputError("GGUF files of 'gemma2' always have windows and soft caps; keep the model as a checkpoint")
    return {"attention.sliding_window": keys["sliding_window"], **{key: float(cap) for key, cap in caps.items()}}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window") or None
    every = metadata.number("attention.sliding_window_pattern", 6)
    return {
        **_with_four_norms(metadata, "gemma3_text"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": 1 if window is None else every,
        **({} if window is None else {"sliding_window": window}),
    }


def _of_gemma3(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    cap = keys["final_logit_softcapping"]
    found: dict[str, Any] = {} if cap is None else {"final_logit_softcapping": float(cap)}
    if "sliding_window" not in keys:
        return found
    return found | {
        "attention.sliding_window": keys["sliding_window"],
        # Layers in another order have no pattern, and are found to differ when this is read.
        "attention.sliding_window_pattern": keys.get("sliding_window_pattern", 6),
        "rope.freq_base_swa": float(keys["rope_local_base_freq"]),
    }


GEMMA = {
    "gemma": Architecture(
        config=_gemma,
        families=("gemma",),
        keys=RMS_NORM,
        unread=(OUTPUT_BIAS,),
        norms_from_one=True,
        table=(*EMBEDDING_ROW, *ATTENTION, *FFN, *TIED_HEAD),
    ),
    "gemma2": Architecture(
        config=_gemma2,
        metadata=_of_gemma2,
        families=("gemma2",),
        keys=RMS_NORM,
        unread=(OUTPUT_BIAS,),
        norms_from_one=True,
        table=(*EMBEDDING_ROW, *ATTENTION, *_POST_NORMS, *FFN, *TIED_HEAD),
    ),
    "gemma3": Architecture(
        config=_gemma3,
        metadata=_of_gemma3,
        families=("gemma3_text",),
        keys=RMS_NORM,
        unread=(OUTPUT_BIAS,),
        norms_from_one=True,
        table=(*EMBEDDING_ROW, *ATTENTION, *_POST_NORMS, *FFN, *HEAD),
    ),
}
