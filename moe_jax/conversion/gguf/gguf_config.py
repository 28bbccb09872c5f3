"""The metadata of a GGUF file as a config.json.

Every key of the architecture must be known here: an unknown one could change what the model computes, and is an error.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_jax.conversion.gguf.architectures.gguf_architectures import architecture_of
from moe_jax.conversion.gguf.architectures.gguf_description import (
    EMBEDDING,
    KEYS,
    ROPE_FACTORS,
    YARN_MAGNITUDE,
    Metadata,
)
from moe_jax.conversion.tensors import DTYPES, TensorEntry
from moe_jax.core.errors import InputError, raise_if_any, shown


def hugging_face_config(
    data: Mapping[str, Any], tensors: Mapping[str, TensorEntry], factors: np.ndarray | None
) -> dict[str, Any]:
    """Returns the config.json that metadata stand for; `factors` is the tensor `ROPE_FACTORS`, if there is one.

    Raises:
      InputError: if a key is missing, of another type, or unknown.
    """
    name, architecture = architecture_of(data)
    metadata = Metadata(data, name, tensors)
    config = {theirs: metadata.number(key) for key, theirs in (KEYS | dict(architecture.keys)).items()}
    if not architecture.latent:
        config |= _read_heads(metadata, config, partial=architecture.partial)
    config["rope_theta"] = metadata.number("rope.freq_base", 10000.0)
    config["rope_scaling"] = _read_rope_scaling(metadata, factors, config, latent=architecture.latent)
    config |= {"hidden_act": "silu"} | architecture.config(metadata)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    embedding = tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(f"it has no {EMBEDDING} with two axes, whose rows are the vocabulary")
    config["vocab_size"] = embedding.shape[0]
    config |= _special_tokens(data)
    config["torch_dtype"] = _main_dtype(tensors)
    for key, *values in _AS_USUAL:
        if not metadata.is_read(key):
            metadata.must_be(key, *values)
    for key in _WITHOUT_EFFECT:
        metadata.get(key)
    raise_if_any([f"{shown(key)} is unknown, and could change what is computed" for key in metadata.unread()],
                 "its metadata")  # fmt: skip
    return config


def _read_heads(metadata: Metadata, config: Mapping[str, Any], *, partial: bool) -> dict[str, Any]:
    """Returns the keys about heads of queries, keys and values that are equally wide."""
    heads = config["num_attention_heads"]
    found = {"num_key_value_heads": metadata.number("attention.head_count_kv", heads)}
    head_dim = metadata.number("attention.key_length", config["hidden_size"] // heads if heads else 0)
    metadata.must_be("attention.value_length", head_dim)
    rotated = metadata.number("rope.dimension_count", head_dim)
    if partial and 0 < rotated <= head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise InputError(
            f"{metadata.full_name('rope.dimension_count')} is {shown(rotated)}, but heads have {shown(head_dim)}"
        )
    return {**found, "head_dim": head_dim}


# Keys for which our families compute only one value, or several of equal meaning, unless they read them themselves.
_AS_USUAL: tuple[tuple[Any, ...], ...] = (
    ("attention.causal", True),
    ("expert_gating_func", 1, 0),
    ("expert_weights_scale", 0.0, 1.0),
    ("expert_shared_count", 0),
    ("expert_group_count", 0, 1),
    ("expert_group_used_count", 0, 1),
    ("leading_dense_block_count", 0),
    ("interleave_moe_layer_step", 1, 0),
    ("pooling_type", 0),
    ("nextn_predict_layers", 0),
    ("logit_scale", 1.0, 0.0),
    ("embedding_scale", 1.0, 0.0),
    ("residual_scale", 1.0, 0.0),
    ("attention.max_alibi_bias", 0.0),
)
# Redundant with the shape of the embedding; used in fine-tuning; how the file was made; implied by `expert_count`.
_WITHOUT_EFFECT = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "expert_feed_forward_length",
                   "expert_weights_norm")  # fmt: skip


def as_stored(value: Any) -> Any:
    """Returns a number as it is read again: floats have 32 bits."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _special_tokens(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns BOS, and the tokens that end a text: EOS, and the end tokens of chats if there are any."""
    bos, *ends = (data.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom"))
    found = list(dict.fromkeys(end for end in ends if end is not None))
    return {"bos_token_id": bos, "eos_token_id": found[0] if len(found) == 1 else found or None}


def _main_dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Returns the dtype in which most elements are read."""
    sizes = Counter[str]()
    for entry in tensors.values():
        sizes[entry.dtype] += math.prod(entry.shape)
    return str(DTYPES[sizes.most_common(1)[0][0]])


# --- rotary embeddings ----------------------------------------------------------------------------

# The parameters of Llama 3.1 and all models after it; the tensor holds only the factors that follow from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}


def _read_rope_scaling(
    metadata: Metadata, factors: np.ndarray | None, config: Mapping[str, Any], *, latent: bool
) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of a config.json.

    The `factors` are divisors of the frequencies of rotated pairs; `latent` attention scales its scores with YaRN.
    """
    linear = metadata.get("rope.scale_linear", 1.0)
    kind = metadata.get("rope.scaling.type", "linear" if linear != 1.0 else "none")
    if kind not in ("none", "linear", "yarn"):
        raise InputError(f"rope.scaling.type is {shown(kind)}, expected none, linear or yarn")
    scaling: dict[str, Any] | None = None
    if kind == "linear":
        scaling = {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor", linear)}
    elif kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.number("rope.scaling.original_context_length"),
        }
        given = {theirs: metadata.get(key) for key, theirs in _YARN.items()}
        scaling |= {key: value for key, value in given.items() if value is not None}
        if latent:
            magnitude = as_stored(10 * metadata.number(YARN_MAGNITUDE))
            scaling |= {"mscale": magnitude, "mscale_all_dim": magnitude}
    if factors is None:
        return scaling
    if scaling is not None:
        raise InputError(f"it has both {ROPE_FACTORS} and rope.scaling.type {kind!r}, which is not supported")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise InputError(f"{ROPE_FACTORS} holds numbers that are not finite and above 0")
    if (factors == 1).all():
        return None
    factor = float(factors.max())
    expected = llama3_factors(2 * len(factors), config["rope_theta"], factor, **_LLAMA3)
    if np.allclose(factors, expected, rtol=1e-5, atol=0):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    # The same frequencies under the only name that allows any factors.
    numbers = [float(str(number)) for number in factors]
    return {
        "rope_type": "longrope",
        "short_factor": numbers,
        "long_factor": numbers,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def llama3_factors(
    rotated: int,
    theta: float,
    factor: float,
    *,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """Returns Llama 3's divisors of the frequencies of its rotated pairs.

    Waves that fit into the original context `high_freq_factor` times stay as they are, those that do not fit into it
    `low_freq_factor` times are stretched by `factor`, and the frequencies of the others are interpolated.
    """
    waves = 2 * math.pi * np.float64(theta) ** (np.arange(0, rotated, 2) / rotated)
    fits = original_max_position_embeddings / waves
    between = high_freq_factor - low_freq_factor
    kept = np.clip((fits - low_freq_factor) / between, 0, 1) if between else fits >= low_freq_factor
    return 1 / ((1 - kept) / factor + kept)
