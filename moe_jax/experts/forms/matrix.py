"""Arguments that the methods of forms have in common: a matrix, a part of it, columns of it, the load of a layer."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.core.draws import INIT_STD
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


T = TypeVar("T")


class ShapesOnly(nnx.Rngs):
    """Random keys for a module of which only the shapes are wanted: what is drawn here is zeros instead.

    To trace the draws takes several times as long as to trace the rest of a model.
    """


def shapes_of(make: Callable[[nnx.Rngs], T]) -> T:
    """Returns what `make` returns, such as a module, with `ShapeDtypeStruct`s in place of its arrays."""
    return nnx.eval_shape(lambda: make(ShapesOnly(0)))


def normal_kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """An initial kernel: normal with standard deviation 0.02."""
    if isinstance(rngs, ShapesOnly):
        return jnp.zeros(shape, dtype)
    return (INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


def uniform_factor(
    rngs: nnx.Rngs, stack: tuple[int, ...], fan_in: int, rank: int, dtype: jnp.dtype
) -> Float[Array, "... i r"]:
    """The factor `a` of a product `a b` as in LoRA: kaiming uniform with a = sqrt(5), which is ±1/sqrt(fan_in)."""
    if isinstance(rngs, ShapesOnly):
        return jnp.zeros((*stack, fan_in, rank), dtype)
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(rngs.params(), (*stack, fan_in, rank), jnp.float32, -bound, bound).astype(dtype)
