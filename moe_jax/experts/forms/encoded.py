"""What compression gives to the forms of experts: numerical methods that encode a kernel, and what they return."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import numpy as np
from jaxtyping import Float


class Encoded(NamedTuple):
    """A kernel in codes.

    Attributes:
      leaves: by name, as `packing` describes them: packed codes, their scales, and what else the form has.
      approximation: float32, what they stand for.
    """

    leaves: Mapping[str, Any]
    approximation: Any

    @property
    def codes(self) -> Any:
        """Packed codes."""
        return self.leaves["codes"]

    @property
    def scales(self) -> Any:
        """Their scales."""
        return self.leaves["scales"]


class MoreOfCodes(TypedDict, total=False):
    """What the format of codes may have beside bits and groups: options of `forms.Quantized`."""

    table: bool
    scale_bits: int
    zero_points: bool
    row_scales: bool


class Coder(Protocol):
    """The numerical methods with which compression encodes residuals."""

    def factors(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The best approximation `left @ right.T` of a rank: `left` [n, r] and `right` [w, r], float32."""
        ...

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        """Quantises, in the format that the options of `forms.Quantized` describe."""
        ...


class JointCoder(Protocol):
    """The numerical methods with which compression encodes the matrices of an expert together."""

    def factors(
        self, rows: Mapping[str, Float[np.ndarray, "f d"]], rank: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The best approximation `left @ right[name].T` of `rows[name]`: `left` [f, r], `right` [d, r] each, float32.

        Args:
          rows: the matrices of an expert, with a row for every neuron.
          rank: r.
        """
        ...
