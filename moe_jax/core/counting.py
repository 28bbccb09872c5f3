"""Counts of parameters and bytes."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that only count start faster without JAX
    import jax


def is_parameter(spec: "jax.ShapeDtypeStruct") -> bool:
    """Whether a leaf holds parameters. Integers are positions of sparse deltas, or codes (methods.md 8)."""
    return spec.dtype.kind not in "iu"


def count_parameters(specs: "Iterable[jax.ShapeDtypeStruct]") -> int:
    """Number of parameters in leaves; integers are not counted."""
    return sum(math.prod(spec.shape) for spec in specs if is_parameter(spec))


def count_bytes(specs: "Iterable[jax.ShapeDtypeStruct]") -> int:
    """Number of bytes in leaves, integers included."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
