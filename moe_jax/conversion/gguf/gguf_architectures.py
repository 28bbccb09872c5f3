"""Descriptions of models in GGUF files, by architecture: their keys as keys of config.json, and their tensors.

A GGUF file has the same numbers as the config.json that it was made from, under other names. So its metadata become a
config.json, which the families read, and only the tables of tensors differ. Every key of the architecture must be known
here: an unknown one could change what the model computes, and is an error.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored, Row, Table, joined_qkv, linear, norm
from moe_jax.conversion.tensors import DTYPES, TensorEntry
from moe_jax.core.errors import InputError, is_finite, nearest, raise_if_any, shown

ROPE_FACTORS = "rope_freqs.weight"
ARCHITECTURE = "general.architecture"
EMBEDDING = "token_embd.weight"

# --- reading metadata -----------------------------------------------------------------------------


class Metadata:
    """The metadata of one architecture, read key by key; remembers which keys were read."""

    def __init__(self, data: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorEntry]):
        self._data, self._prefix, self._tensors = data, f"{prefix}.", tensors
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key of the architecture; for an array of one equal number per layer, the number."""
        self._read.add(self._prefix + key)
        value = self._data.get(self._prefix + key, default)
        if isinstance(value, np.ndarray):
            if not value.size or (value != value.flat[0]).any():
                raise InputError(f"{self._prefix}{key} differs between layers, which is not supported")
            return value.flat[0].item()
        return value

    def number(self, key: str, default: int | float | None = None) -> Any:
        """Returns a number that must be there unless it has a default."""
        value = self.get(key, default)
        if value is None:
            raise InputError(f"it has no {self._prefix}{key}, which cannot be guessed")
        if not is_finite(value):
            raise InputError(f"{self._prefix}{key} is {shown(value)}, expected a number")
        return value

    def has(self, *names: str) -> bool:
        """Whether the first layer has a tensor of one of these names."""
        return any(f"blk.0.{name}" in self._tensors for name in names)

    def must_be(self, key: str, *values: Any) -> None:
        """Raises `InputError` unless the key has one of these values, or is left out."""
        found = self.get(key, values[0])
        if found not in values:
            raise InputError(f"{self._prefix}{key} is {shown(found)}, only {shown(values[0])} is supported")

    def unread(self) -> list[str]:
        """Returns the keys of the architecture that were not read."""
        return [key for key in self._data if key.startswith(self._prefix) and key not in self._read]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
      config: metadata -> the keys of config.json that not all architectures have, `model_type` among them.
      keys: key of the metadata, without the architecture's name -> key of config.json.
      table: its tensors.
      interleaved: whether the rows of queries and keys alternate between the halves of a head's rotary dimensions.
      partial: whether only a part of a head may be rotated.
    """

    config: Callable[[Metadata], dict[str, Any]]
    keys: Mapping[str, str]
    table: Table
    interleaved: bool = False
    partial: bool = False


# --- what they have in common ---------------------------------------------------------------------

RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}

_EMBEDDING: Table = (Row(EMBEDDING, "embed/embedding"),)

_NORMS: Table = (
    *norm("blk.{i}.attn_norm", "layers/{i}/attention_norm"),
    *norm("blk.{i}.attn_q_norm", "layers/{i}/attention/q_norm"),
    *norm("blk.{i}.attn_k_norm", "layers/{i}/attention/k_norm"),
    *norm("blk.{i}.ffn_norm", "layers/{i}/mlp_norm"),
)

_ATTENTION: Table = (
    *_NORMS,
    *linear("blk.{i}.attn_q", "layers/{i}/attention/q"),
    *linear("blk.{i}.attn_k", "layers/{i}/attention/k"),
    *linear("blk.{i}.attn_v", "layers/{i}/attention/v"),
    *linear("blk.{i}.attn_output", "layers/{i}/attention/o"),
)

_FFN: Table = (
    *linear("blk.{i}.ffn_gate", "layers/{i}/mlp/gate"),
    *linear("blk.{i}.ffn_up", "layers/{i}/mlp/up"),
    *linear("blk.{i}.ffn_down", "layers/{i}/mlp/down"),
)

_EXPERTS: Table = (
    *linear("blk.{i}.ffn_gate_inp", "layers/{i}/mlp/router"),
    *(
        row
        for name in ("gate", "up", "down")
        for row in (
            # The first files of Mixtral have a tensor for each expert.
            *linear(f"blk.{{i}}.ffn_{name}.{{e}}", f"layers/{{i}}/mlp/experts/{name}", PER_EXPERT),
            *linear(f"blk.{{i}}.ffn_{name}_exps", f"layers/{{i}}/mlp/experts/{name}", FUSED),
        )
    ),
)

_HEAD: Table = (
    *norm("output_norm", "final_norm"),
    *linear("output", "lm_head"),
    Ignored(re.escape(ROPE_FACTORS), "factors of the RoPE frequencies, which the config holds"),
)

_LLAMA_LIKE: Table = (*_EMBEDDING, *_ATTENTION, *_FFN, *_HEAD)
_LLAMA_LIKE_MOE: Table = (*_EMBEDDING, *_ATTENTION, *_EXPERTS, *_HEAD)

# --- the architectures ----------------------------------------------------------------------------


def _llama(metadata: Metadata) -> dict[str, Any]:
    """Returns the keys of Llama, Mistral and Mixtral, which share an architecture and differ in experts and windows."""
    window = metadata.get("attention.sliding_window") or None
    if metadata.get("expert_count", 0):
        return {
            "model_type": "mixtral",
            "num_local_experts": metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
            "sliding_window": window,
        }
    metadata.must_be("expert_used_count", 0)
    if window is not None:
        return {"model_type": "mistral", "sliding_window": window}
    return {
        "model_type": "llama",
        "attention_bias": metadata.has("attn_q.bias", "attn_output.bias"),
        "mlp_bias": metadata.has("ffn_up.bias"),
    }


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3", "attention_bias": metadata.has("attn_q.bias")}


def _moe(metadata: Metadata) -> dict[str, Any]:
    """Returns the keys of models with an MoE in every layer."""
    return {
        "attention_bias": metadata.has("attn_q.bias"),
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
    }


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    width = metadata.number("expert_feed_forward_length")
    return {"model_type": "qwen3_moe", **_moe(metadata), "moe_intermediate_size": width, "norm_topk_prob": True}


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    clip = metadata.get("attention.clamp_kqv") or None
    return {"model_type": "olmoe", **_moe(metadata), "clip_qkv": clip, "norm_topk_prob": False}


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    metadata.get("use_parallel_residual")  # set in some files of models with a second norm, which have none
    return {
        "model_type": "stablelm",
        "use_qkv_bias": metadata.has("attn_q.bias"),
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
        "use_parallel_residual": not metadata.has("ffn_norm.weight"),
    }


ARCHITECTURES = {
    "llama": Architecture(config=_llama, keys=RMS_NORM, interleaved=True,
                          table=(*_EMBEDDING, *_ATTENTION, *_FFN, *_EXPERTS, *_HEAD)),
    "qwen2": Architecture(config=lambda _: {"model_type": "qwen2"}, keys=RMS_NORM, table=_LLAMA_LIKE),
    "qwen3": Architecture(config=_qwen3, keys=RMS_NORM, table=_LLAMA_LIKE),
    "qwen3moe": Architecture(config=_qwen3_moe, keys=RMS_NORM, table=_LLAMA_LIKE_MOE),
    "olmoe": Architecture(config=_olmoe, keys=RMS_NORM, table=_LLAMA_LIKE_MOE),
    "stablelm": Architecture(config=_stablelm, keys=LAYER_NORM, table=_LLAMA_LIKE, partial=True),
    "phi2": Architecture(
        config=lambda _: {"model_type": "phi", "hidden_act": "gelu_new"},
        keys=LAYER_NORM,
        partial=True,
        table=(
            *_EMBEDDING,
            *norm("blk.{i}.attn_norm", "layers/{i}/attention_norm"),
            *linear("blk.{i}.attn_q", "layers/{i}/attention/q", PER_EXPERT),
            *linear("blk.{i}.attn_k", "layers/{i}/attention/k", PER_EXPERT),
            *linear("blk.{i}.attn_v", "layers/{i}/attention/v", PER_EXPERT),
            *joined_qkv("blk.{i}.attn_qkv", FUSED),
            *linear("blk.{i}.attn_output", "layers/{i}/attention/o"),
            *linear("blk.{i}.ffn_up", "layers/{i}/mlp/up"),
            *linear("blk.{i}.ffn_down", "layers/{i}/mlp/down"),
            *_HEAD,
        ),
    ),
}  # fmt: skip

# --- the whole ------------------------------------------------------------------------------------


def architecture_of(data: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Returns name and description of the architecture that metadata name; raises `InputError` if it is unknown."""
    name = data.get(ARCHITECTURE)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        hint = nearest(name, ARCHITECTURES) if isinstance(name, str) else ""
        raise InputError(f"{ARCHITECTURE} is {shown(name)}{hint}; known: {', '.join(ARCHITECTURES)}")
    if data.get("general.type", "model") != "model":
        raise InputError(f"general.type is {shown(data['general.type'])}, only a whole model can be read")
    return name, ARCHITECTURES[name]


def hugging_face_config(
    data: Mapping[str, Any], tensors: Mapping[str, TensorEntry], factors: np.ndarray | None
) -> dict[str, Any]:
    """Returns the config.json that metadata stand for; `factors` is the tensor `ROPE_FACTORS`, if there is one.

    Raises:
      InputError: if a key is missing, of another type, or unknown.
    """
    name, architecture = architecture_of(data)
    metadata = Metadata(data, name, tensors)
    config = {theirs: metadata.number(key) for key, theirs in (_KEYS | dict(architecture.keys)).items()}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = metadata.number("attention.head_count_kv", heads)
    head_dim = metadata.number("attention.key_length", config["hidden_size"] // heads if heads else 0)
    config["head_dim"] = head_dim
    metadata.must_be("attention.value_length", head_dim)
    rotated = metadata.number("rope.dimension_count", head_dim)
    if architecture.partial and 0 < rotated <= head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise InputError(f"{name}.rope.dimension_count is {shown(rotated)}, but heads have {shown(head_dim)}")
    config["rope_theta"] = metadata.number("rope.freq_base", 10000.0)
    config["rope_scaling"] = _read_rope_scaling(metadata, factors, config)
    config |= {"hidden_act": "silu"} | architecture.config(metadata)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    embedding = tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(f"it has no {EMBEDDING} with two axes, whose rows are the vocabulary")
    config["vocab_size"] = embedding.shape[0]
    config |= _special_tokens(data)
    config["torch_dtype"] = _main_dtype(tensors)
    for key, *values in _AS_USUAL:
        metadata.must_be(key, *values)
    for key in _WITHOUT_EFFECT:
        metadata.get(key)
    raise_if_any([f"{shown(key)} is unknown, and could change what is computed" for key in metadata.unread()],
                 "its metadata")  # fmt: skip
    return config


# Keys for which our families compute only one value, or several of equal meaning.
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
    metadata: Metadata, factors: np.ndarray | None, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of a config.json; `factors` are divisors of the frequencies of rotated pairs."""
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
    kept = np.clip((fits - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - kept) / factor + kept)
