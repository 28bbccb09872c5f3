"""What the methods of a form are told: which matrix, which part of it, and how much is to be done."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.experts.config import FFNConfig

Split = Literal["in", "out"]
Arrays = Mapping[str, Array]
BASE = "base"
"""Under this name the base stands among the arrays of a matrix."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix: of an FFN, or any linear map. Without arrays.

    Attributes:
      name: `gate`, `up`, `down`, or what a module calls it.
      shape: [in, out].
      split: the axis that the mesh axis `tensor` splits. Of an FFN's matrices it is that of the neurons.
      index: its place among `FFNConfig.matrices`.
    """

    name: str
    shape: tuple[int, int]
    split: Split = "out"
    index: int = 0

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


def ffn_matrices(expert: FFNConfig, d_model: int) -> dict[str, Matrix]:
    """The matrices of an FFN, by name, in the order of use."""
    return {
        name: Matrix(name, shape, "in" if name == "down" else "out", index)
        for index, (name, shape) in enumerate(expert.shapes(d_model).items())
    }


class Part(NamedTuple):
    """What one device has of every kernel of a matrix: its shape, and the row and column at which it begins."""

    shape: tuple[int, int]
    origin: Int[Array, "2"]


class Window(NamedTuple):
    """Which columns of a kernel are wanted, or of the part of it that a device has.

    Attributes:
      shape: [in, out] of the part.
      whole: [in, out] of the kernel.
      origin: row and column of the kernel at which the part begins; None: the part is the kernel.
      start, width: columns start ... start + width of the part.
    """

    shape: tuple[int, int]
    whole: tuple[int, int]
    origin: Int[Array, "2"] | None
    start: Int[Array, ""] | int
    width: int

    @classmethod
    def all(cls, shape: tuple[int, int]) -> "Window":
        """All columns of a kernel."""
        return cls(shape, shape, None, 0, shape[1])

    def columns(self, array: Float[Array, "n o"]) -> Float[Array, "n w"]:
        """The wanted columns of an array that is split as the columns of the kernel are."""
        if self.width == array.shape[1]:
            return array
        return lax.dynamic_slice_in_dim(array, self.start, self.width, 1)


class Load(NamedTuple):
    """How much a layer is asked to do at once: E experts, T tokens, k experts for each."""

    num_experts: int
    tokens: int
    top_k: int

    @property
    def rows(self) -> int:
        """Rows that meet an expert of their own."""
        return self.tokens * self.top_k

    @property
    def used_experts(self) -> float:
        """Experts that are chosen by at least one token, on average."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** self.tokens)
