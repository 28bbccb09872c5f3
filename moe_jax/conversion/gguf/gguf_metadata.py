"""The metadata that describe a model in a GGUF file, checked by reading them back."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.conversion.gguf.architectures.gguf_architectures import architecture_for
from moe_jax.conversion.gguf.architectures.gguf_description import KEYS, ROPE_FACTORS, Architecture
from moe_jax.conversion.gguf.gguf_config import as_stored, hugging_face_config, llama3_factors
from moe_jax.conversion.gguf.gguf_header import PLAIN
from moe_jax.conversion.hf_config import differences, read_hf_config, write_hf_config
from moe_jax.conversion.tensors import TensorEntry
from moe_jax.core.errors import InputError, raise_if_any
from moe_jax.models import ModelConfig, RopeConfig


class Described(NamedTuple):
    """A model as a GGUF file describes it.

    Attributes:
      name: of the architecture.
      architecture: its description.
      config: of the model as it is written.
      metadata: the keys of the architecture, whole, with the values that will be read.
      factors: the tensor `ROPE_FACTORS`, Float32[rotated / 2]; None: there is none.
      notes: lines about what llama.cpp does otherwise.
    """

    name: str
    architecture: Architecture
    config: ModelConfig
    metadata: dict[str, Any]
    factors: np.ndarray | None
    notes: list[str]


def described(config: ModelConfig) -> Described:
    """Returns the description of a model whose config is from `exported_config`.

    Raises:
      InputError: if there is no architecture for its family, or llama.cpp would not read such a model in it.
    """
    name, architecture = architecture_for(config)
    attention, notes = config.layers[0].softmax_attention, []
    if architecture.square_heads and attention.num_heads * attention.head_dim != config.d_model:
        raise InputError(
            f"llama.cpp reads no models of {name!r} whose heads are {attention.num_heads} x {attention.head_dim} and "
            f"not {config.d_model} wide, as the model is; keep it as a checkpoint"
        )
    if architecture.own_keys and attention.num_heads != attention.num_kv_heads:
        raise InputError(
            f"llama.cpp reads no models of {name!r} whose {attention.num_heads} heads share {attention.num_kv_heads} "
            "keys; keep it as a checkpoint"
        )
    if architecture.head_apart and config.tie_embeddings:
        config = dataclasses.replace(config, tie_embeddings=False)
        notes.append(f"note: llama.cpp needs an output of its own in {name!r}: the embedding is written twice")
    metadata, factors = _metadata_of(config, name, architecture)
    notes += architecture.notes(config)
    for key in (f"{name}.{one}" for one in architecture.ignored):
        if key in metadata:
            notes.append(
                f"note: llama.cpp does not read {key} ({metadata[key]}): it has other logits where that counts"
            )
    return Described(name, architecture, config, metadata, factors, notes)


def _metadata_of(
    config: ModelConfig, name: str, architecture: Architecture
) -> tuple[dict[str, Any], np.ndarray | None]:
    keys = write_hf_config(config)
    attention = config.layers[0].softmax_attention
    # Of models with experts alone, no config.json says the width of an FFN, and llama.cpp reads one all the same.
    keys.setdefault("intermediate_size", keys.get("moe_intermediate_size"))
    found = {key: keys[theirs] for key, theirs in (KEYS | dict(architecture.keys)).items()}
    found |= {
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "rope.dimension_count": int(attention.head_dim * config.rope.fraction),
        "rope.freq_base": float(config.rope.theta),
        "vocab_size": config.vocab_size,
    }
    scaling, factors = _rope_scaling(config, attention.head_dim)
    if factors is not None and not architecture.scales_frequencies:
        raise InputError(
            f"llama.cpp reads no rope scaling {config.rope.scaling!r} of {name!r}; keep the model as a checkpoint"
        )
    found |= scaling | architecture.metadata(config, keys)
    return {f"{name}.{key}": as_stored(value) for key, value in found.items()}, factors


def check_read_back(described: Described, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `InputError` unless a file with this description and these shapes of tensors is read as the same model."""
    config = described.config
    for name in tensors:
        if name.endswith(described.architecture.unread):
            raise InputError(f"llama.cpp reads no {name} of {described.name!r}; keep the model as a checkpoint")
    entries = {name: TensorEntry(Path(), PLAIN[0], shape, 0, None) for name, shape in tensors.items()}
    data = {"general.architecture": described.name, **described.metadata}
    written = read_hf_config(hugging_face_config(data, entries, described.factors))
    ours = dataclasses.replace(
        config,
        norm_eps=as_stored(config.norm_eps),
        rope=_stored_rope(config.rope, config.layers[0].softmax_attention.head_dim),
        # They stand beside the tokenizer.
        bos_id=None,
        eos_ids=(),
    )
    if described.factors is not None:  # the same frequencies may have another name
        written = dataclasses.replace(written, rope=ours.rope)
    raise_if_any(
        differences(ours, written), f"GGUF files of the architecture {described.name!r} cannot hold this model"
    )


def _stored_rope(rope: RopeConfig, head_dim: int) -> RopeConfig:
    fields = {field.name: as_stored(getattr(rope, field.name)) for field in dataclasses.fields(rope)}
    if _is_usual(rope):
        fields["attention_factor"] = None
    return dataclasses.replace(rope, **(fields | {"fraction": int(head_dim * rope.fraction) / head_dim}))


def _is_usual(rope: RopeConfig) -> bool:
    """Whether the factor of cos and sin is that of YaRN's formula, which llama.cpp computes itself."""
    if rope.scaling != "yarn" or rope.attention_factor is None:
        return False
    return math.isclose(rope.attention_factor, 0.1 * math.log(rope.factor) + 1.0, rel_tol=1e-6)


def _rope_scaling(config: ModelConfig, head_dim: int) -> tuple[dict[str, Any], np.ndarray | None]:
    """Returns the keys of a scaling, and the divisors of the frequencies, if it has any of its own."""
    rope = config.rope
    rotated = int(head_dim * rope.fraction)
    if rope.scaling == "none":
        return {}, None
    if rope.scaling == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}, None
    if rope.scaling == "yarn":
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope.factor),
            "rope.scaling.original_context_length": rope.original_max_positions,
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }, None
    if rope.scaling == "llama3":
        factors = llama3_factors(
            rotated,
            rope.theta,
            rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position_embeddings=rope.original_max_positions or config.max_positions,
        )
        return {}, factors.astype(np.float32)
    if rope.scaling == "longrope" and rope.short_factor == rope.long_factor and rope.attention_factor == 1.0:
        return {}, np.asarray(rope.short_factor, np.float32)
    raise InputError(
        f"GGUF files have no rope scaling {rope.scaling!r}"
        + (" with other factors for long texts" if rope.scaling == "longrope" else "")
        + "; keep the model as a checkpoint"
    )


def row_orders(config: ModelConfig, architecture: Architecture) -> dict[str, np.ndarray]:
    """Returns, for each tensor whose rows are in another order than the leaf's, the leaf's row of each of its rows.

    The rows of a head alternate between the halves of its rotary dimensions: 0, h/2, 1, h/2 + 1, ...
    """
    orders: dict[str, np.ndarray] = {}
    for i, layer in enumerate(config.layers if architecture.interleaved else ()):
        attention = layer.softmax_attention
        for which, heads in (("q", attention.num_heads), ("k", attention.num_kv_heads)):
            rows = np.arange(heads * attention.head_dim).reshape(heads, 2, attention.head_dim // 2)
            order = rows.swapaxes(1, 2).reshape(-1)
            orders |= {f"blk.{i}.attn_{which}.{part}": order for part in ("weight", "bias")}
    return orders


def tensor_shapes(
    mapped: Mapping[str, tuple[int, ...]], architecture: Architecture, factors: np.ndarray | None
) -> dict[str, tuple[int, ...]]:
    """Returns the tensors as the file has them: some with one axis fewer than in the table, and the factors."""
    shapes = {
        name: shape[1:] if any(name.endswith(vector) for vector in architecture.vectors) else shape
        for name, shape in mapped.items()
    }
    return shapes if factors is None else {ROPE_FACTORS: factors.shape, **shapes}
