"""The architectures of GGUF files, read and written: keys that not all of them have, and their tensors.

A GGUF file has the same numbers as the config.json that it was made from, under other names. So its metadata become a
config.json, which the families read, and the other way round (`gguf_config`, `gguf_metadata`); only the tables of
tensors differ.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored, Row, Table, joined_qkv, linear, norm
from moe_jax.conversion.tensors import TensorEntry
from moe_jax.core.errors import InputError, is_finite, nearest, shown
from moe_jax.models import ModelConfig

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
      families: the families whose models are written in it.
      metadata: config and its config.json -> the keys of the metadata that not all architectures have.
      interleaved: whether the rows of queries and keys alternate between the halves of a head's rotary dimensions.
      partial: whether only a part of a head may be rotated.
      scales_frequencies: whether llama.cpp reads the tensor `ROPE_FACTORS`.
      head_apart: whether llama.cpp reads an output in a tensor of its own only, and not from the embedding.
      square_heads: whether llama.cpp reads only heads that together are as wide as the model.
      unread: ends of names of tensors that llama.cpp does not know in it.
      vectors: tensors that have one axis here, and a row of it in the table.
    """

    config: Callable[[Metadata], dict[str, Any]]
    keys: Mapping[str, str]
    table: Table
    families: tuple[str, ...]
    metadata: Callable[[ModelConfig, Mapping[str, Any]], dict[str, Any]] = lambda config, keys: {}
    interleaved: bool = False
    partial: bool = False
    scales_frequencies: bool = False
    head_apart: bool = False
    square_heads: bool = False
    unread: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()

    def in_table(self, name: str, entry: TensorEntry) -> TensorEntry:
        """Returns the entry of a tensor with the axes that it has in the table."""
        is_vector = any(name.endswith(vector) for vector in self.vectors)
        return entry._replace(shape=(1, *entry.shape)) if is_vector and len(entry.shape) == 1 else entry


# --- what they have in common ---------------------------------------------------------------------

RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}

KEYS = {
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

_OUTPUT_BIAS = "attn_output.bias"

_SHARED_GATE = "ffn_gate_inp_shexp.weight"

_SHARED_EXPERT: Table = (
    *linear("blk.{i}.ffn_gate_inp_shexp", "layers/{i}/mlp/router/universal"),
    *linear("blk.{i}.ffn_gate_shexp", "layers/{i}/mlp/universal/gate"),
    *linear("blk.{i}.ffn_up_shexp", "layers/{i}/mlp/universal/up"),
    *linear("blk.{i}.ffn_down_shexp", "layers/{i}/mlp/universal/down"),
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


def _of_llama(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.get("sliding_window")
    experts = _experts_of(config) if config.moe_layers else {}
    return experts if window is None else experts | {"attention.sliding_window": window}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3", "attention_bias": metadata.has("attn_q.bias")}


def _moe(metadata: Metadata) -> dict[str, Any]:
    """Returns the keys of models with an MoE in every layer."""
    return {
        "attention_bias": metadata.has("attn_q.bias"),
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
    }


def _experts_of(config: ModelConfig) -> dict[str, Any]:
    """Returns the numbers of experts; of layers that differ in them, those of the first."""
    moe = config.moe(config.moe_layers[0])
    return {"expert_count": moe.num_experts, "expert_used_count": moe.top_k}


def _wide_experts_of(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {**_experts_of(config), "expert_feed_forward_length": keys["moe_intermediate_size"]}


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    experts = _moe(metadata)
    biases = experts.pop("attention_bias")  # not of the output
    return {
        "model_type": "qwen2_moe",
        **experts,
        "qkv_bias": biases,
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _of_qwen2_moe(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    shared = keys["shared_expert_intermediate_size"]
    return {**_wide_experts_of(config, keys), "expert_shared_feed_forward_length": shared}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    width = metadata.number("expert_feed_forward_length")
    return {"model_type": "qwen3_moe", **_moe(metadata), "moe_intermediate_size": width, "norm_topk_prob": True}


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    clip = metadata.get("attention.clamp_kqv") or None
    return {"model_type": "olmoe", **_moe(metadata), "clip_qkv": clip, "norm_topk_prob": False}


def _of_olmoe(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    clip = keys.get("clip_qkv")
    return _experts_of(config) if clip is None else {**_experts_of(config), "attention.clamp_kqv": float(clip)}


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    metadata.get("use_parallel_residual")  # set in some files of models with a second norm, which have none
    return {
        "model_type": "stablelm",
        "use_qkv_bias": metadata.has("attn_q.bias"),
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
        "use_parallel_residual": not metadata.has("ffn_norm.weight"),
    }


def _of_stablelm(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": keys["use_parallel_residual"]}


ARCHITECTURES = {
    "llama": Architecture(
        config=_llama,
        metadata=_of_llama,
        families=("llama", "mistral", "mixtral"),
        keys=RMS_NORM,
        interleaved=True,
        scales_frequencies=True,
        table=(*_EMBEDDING, *_ATTENTION, *_FFN, *_EXPERTS, *_HEAD),
    ),
    "qwen2": Architecture(
        config=lambda _: {"model_type": "qwen2"},
        families=("qwen2",),
        keys=RMS_NORM,
        square_heads=True,
        table=_LLAMA_LIKE,
    ),
    "qwen2moe": Architecture(
        config=_qwen2_moe,
        metadata=_of_qwen2_moe,
        families=("qwen2_moe",),
        keys=RMS_NORM,
        vectors=(_SHARED_GATE,),
        head_apart=True,
        square_heads=True,
        table=(*_EMBEDDING, *_ATTENTION, *_EXPERTS, *_SHARED_EXPERT, *_HEAD),
    ),
    "qwen3": Architecture(config=_qwen3, families=("qwen3",), keys=RMS_NORM, unread=(_OUTPUT_BIAS,), table=_LLAMA_LIKE),
    "qwen3moe": Architecture(
        config=_qwen3_moe,
        metadata=_wide_experts_of,
        families=("qwen3_moe",),
        keys=RMS_NORM,
        unread=(_OUTPUT_BIAS,),
        table=_LLAMA_LIKE_MOE,
    ),
    "olmoe": Architecture(
        config=_olmoe,
        metadata=_of_olmoe,
        families=("olmoe",),
        keys=RMS_NORM,
        head_apart=True,
        square_heads=True,
        unread=(_OUTPUT_BIAS,),
        table=_LLAMA_LIKE_MOE,
    ),
    "stablelm": Architecture(
        config=_stablelm,
        metadata=_of_stablelm,
        families=("stablelm",),
        keys=LAYER_NORM,
        partial=True,
        head_apart=True,
        square_heads=True,
        table=_LLAMA_LIKE,
    ),
    "phi2": Architecture(
        config=lambda _: {"model_type": "phi", "hidden_act": "gelu_new"},
        families=("phi",),
        keys=LAYER_NORM,
        partial=True,
        head_apart=True,
        square_heads=True,
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
}


def architecture_of(data: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Returns name and description of the architecture that metadata name; raises `InputError` if it is unknown."""
    name = data.get(ARCHITECTURE)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        hint = nearest(name, ARCHITECTURES) if isinstance(name, str) else ""
        raise InputError(f"{ARCHITECTURE} is {shown(name)}{hint}; known: {', '.join(ARCHITECTURES)}")
    if data.get("general.type", "model") != "model":
        raise InputError(f"general.type is {shown(data['general.type'])}, only a whole model can be read")
    return name, ARCHITECTURES[name]


def architecture_for(config: ModelConfig) -> tuple[str, Architecture]:
    """Returns the architecture that a model is written in; raises `InputError` if its family has none."""
    for name, architecture in ARCHITECTURES.items():
        if config.family in architecture.families:
            return name, architecture
    known = (family for architecture in ARCHITECTURES.values() for family in architecture.families)
    raise InputError(
        f"GGUF files of the family {config.family!r} are not written, known: {', '.join(known)}; llama.cpp's own "
        "script may convert an exported checkpoint"
    )
