"""Figures of linear maps outside the experts, by part of the model, and of the calibration text."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float

from moe_jax.core.formatting import show_bytes


def root_ratio(error: float, norm: float) -> float | None:
    """Returns the root of a sum of squared errors divided by one of squares; None if that is zero."""
    return math.sqrt(error / norm) if norm > 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapErrors:
    """Sums over linear maps: their number, ||W^ - W||^2, ||W||^2, tr(E^T H E), tr(W^T H W), and bytes."""

    maps: int = 0
    error: float = 0.0
    norm: float = 0.0
    output_error: float = 0.0
    output_norm: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0

    @classmethod
    def between(
        cls,
        kernel: Float[np.ndarray, "i o"],
        approximation: Float[np.ndarray, "i o"],
        moment: Float[np.ndarray, "i i"] | None,
        *,
        bytes_before: int,
        bytes_after: int,
    ) -> Self:
        """Returns the sums of one map; without a second moment of its inputs, nothing is known of outputs."""
        error = approximation - kernel
        squares = [float(np.sum(np.square(one, dtype=np.float64))) for one in (error, kernel)]
        outputs = [0.0, 0.0]
        if moment is not None:
            outputs = [float(np.sum(one * (moment @ one), dtype=np.float64)) for one in (error, kernel)]
        return cls(
            maps=1,
            error=squares[0],
            norm=squares[1],
            output_error=outputs[0],
            output_norm=outputs[1],
            bytes_before=bytes_before,
            bytes_after=bytes_after,
        )

    def __add__(self, other: "MapErrors") -> "MapErrors":
        own, others = dataclasses.astuple(self), dataclasses.astuple(other)
        names = [field.name for field in dataclasses.fields(self)]
        return MapErrors(**{name: a + b for name, a, b in zip(names, own, others, strict=True)})


class Losses(NamedTuple):
    """Losses of the calibration text, nats per token.

    Attributes:
      before, after: negative log-likelihoods.
      divergence: KL(p || q) of what the model predicts now from what it predicted.
    """

    before: float
    after: float
    divergence: float


class TriedPlan(NamedTuple):
    """A plan that was tried: the divergence that was expected, and the one that was measured; nats per token."""

    expected: float
    measured: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartReport:
    """Figures of the linear maps of a part of the model; errors as `LayerFigures` has them.

    Attributes:
      part: `attention`, `dense` FFNs and shared experts, `embedding` or `head`.
      maps: their number.
      choice: in words, the codes that they got.
      bytes_before, bytes_after: of their kernels, in memory.
    """

    part: str
    maps: int
    choice: str
    relative_error: float
    output_error: float | None
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(cls, part: str, errors: MapErrors, choice: str) -> Self:
        """Returns the figures of a part, from the sums over its maps."""
        return cls(
            part=part,
            maps=errors.maps,
            choice=choice,
            relative_error=root_ratio(errors.error, errors.norm) or 0.0,
            output_error=root_ratio(errors.output_error, errors.output_norm),
            bytes_before=errors.bytes_before,
            bytes_after=errors.bytes_after,
        )


def part_columns(parts: Sequence[PartReport]) -> dict[str, list[str]]:
    """The figures of linear maps outside the experts as columns of a table, as of `layer_columns`."""
    columns = {
        "part": [part.part for part in parts],
        "maps": [str(part.maps) for part in parts],
        "choice": [part.choice for part in parts],
        "error": [f"{part.relative_error:.4f}" for part in parts],
        "of\noutputs": ["-" if part.output_error is None else f"{part.output_error:.4f}" for part in parts],
        "bytes": [show_bytes(part.bytes_after) for part in parts],
        "kept": [f"{part.bytes_after / part.bytes_before:.1%}" for part in parts],
    }
    return {title: texts for title, texts in columns.items() if {*texts} != {"-"}}
