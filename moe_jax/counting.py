"""Parameters and bytes of leaves."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # counting needs no JAX, and commands start faster without
    import jax


def is_parameter(spec: "jax.ShapeDtypeStruct") -> bool:
    """Whether a leaf holds parameters. Integers are none: they are the positions of sparse deltas (METHODS 8)."""
    return spec.dtype.kind not in "iu"


def count_parameters(specs: "Iterable[jax.ShapeDtypeStruct]") -> int:
    """Parameters of leaves; integers are not counted."""
    return sum(math.prod(spec.shape) for spec in specs if is_parameter(spec))


def count_bytes(specs: "Iterable[jax.ShapeDtypeStruct]") -> int:
    """Bytes of leaves, integers included."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
