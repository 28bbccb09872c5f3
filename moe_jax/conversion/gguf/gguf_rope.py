"""Rotary embeddings in GGUF files: scalings that the metadata name, and factors in a tensor."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from moe_jax.core.errors import InputError, shown

ROPE_FACTORS = "rope_freqs.weight"
# The parameters of Llama 3.1 and all models after it; the tensor holds only the factors that follow from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}


class _Metadata(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...

    def number(self, key: str, default: int | float | None = None) -> Any: ...


def read_rope_scaling(
    metadata: _Metadata, factors: np.ndarray | None, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of a config.json.

    Args:
      metadata: of the file.
      factors: divisors of the frequencies, one for each rotated pair; None: there are none.
      config: the known keys: rope_theta, head_dim, max_position_embeddings.

    Raises:
      InputError: for an unknown scaling, or factors in addition to one.
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
    if factors is None:
        return scaling
    if scaling is not None:
        raise InputError(f"it has both {ROPE_FACTORS} and rope.scaling.type {kind!r}, which is not supported")
    return _scaling_of_factors(factors, config)


def _scaling_of_factors(factors: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the scaling that divides the frequencies by these factors."""
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
