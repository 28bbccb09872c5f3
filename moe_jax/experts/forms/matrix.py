"""Arguments that the methods of forms have in common: a matrix, a part of it, columns of it, the load of a layer."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.experts.layout.config import FFNConfig

Split = Literal["in", "out"]
Arrays = Mapping[str, Array]
BASE = "base"
"""The name of the base among the arrays of a matrix."""
ORIGIN = "origin"
"""The name of the row and column where the part of the kernel begins that the arrays describe."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of an FFN or of a linear map; a description without arrays.

    Attributes:
      name: `gate`, `up` or `down`; empty for a linear map.
      shape: [in, out].
      split: the axis that the mesh axis `tensor` splits. In an FFN this is the axis of the neurons.
      index: its index in `FFNConfig.matrices`.
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
    """The part of every kernel of a matrix that one device holds: its shape, and the row and column where it begins."""

    shape: tuple[int, int]
    origin: Int[Array, "2"]


class Window(NamedTuple):
    """Columns of a kernel, or of the part of it that a device holds.

    Attributes:
      shape: [in, out] of the part.
      whole: [in, out] of the kernel.
      origin: row and column of the kernel where the part begins; None: the part is the whole kernel.
      start, width: the columns are start ... start + width of the part.
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
        """Returns these columns of an array whose last axis is split like the columns of the kernel."""
        if self.width == array.shape[1]:
            return array
        return lax.dynamic_slice_in_dim(array, self.start, self.width, 1)


class Load(NamedTuple):
    """The load of a layer: E experts, T tokens, and k experts per token."""

    num_experts: int
    tokens: int
    top_k: int

    @property
    def rows(self) -> int:
        """Pairs of a token and an expert."""
        return self.tokens * self.top_k

    @property
    def used_experts(self) -> float:
        """Expected number of experts that at least one token chooses, if it chooses uniformly."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** self.tokens)
