"""The shapes of FFNs, adapters and LoRA; matrices and parts of them; and how fresh ones are drawn."""

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
from moe_jax.core.errors import InputError, check_number, check_positive, clipped, shown
from moe_jax.core.formatting import short_repr
from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS, GATED_ACTIVATIONS


def _check_strength(config: "AdapterConfig | LoRAConfig") -> None:
    check_number(config, "scale", "dropout")
    if not 0.0 <= config.dropout < 1.0:
        raise InputError(f"dropout={config.dropout} must lie in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A bottleneck, `scale * act(h Down) Up` (methods.md 6, 7): LoRA's shape, or a parallel or sequential adapter's.

        >>> moe_jax.AdapterConfig(rank=8, activation="gelu", scale=0.25).dropout
        0.0

    Attributes:
      rank: width r of the bottleneck.
      activation: `none` (LoRA), `silu`, `gelu`, `gelu_tanh`, `quick_gelu`, `relu`, `relu2`, or what
        `functional.register_activation` has added.
      scale: s; of LoRA α/r.
      dropout: the share of the entries of `h` that dropout sets to zero in training.
      of_base: the adapter belongs to the base model, and is frozen with it.
    """

    rank: int
    activation: str = "none"
    scale: float = 1.0
    dropout: float = 0.0
    of_base: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "rank")
        if self.activation != "none":
            ACTIVATION_FUNCTIONS.check("activation", self.activation)
        _check_strength(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Products `scale * (x A) B` beside some of a module's kernels (Hu et al. 2021).

        >>> moe_jax.LoRAConfig(rank=8, targets=("q", "v")).scale
        2.0

    Attributes:
      rank: r.
      targets: the names of the kernels in the module.
      scale: α/r.
      dropout: the share of the entries of `x` that dropout sets to zero in training.
    """

    rank: int
    targets: tuple[str, ...]
    scale: float = 2.0
    dropout: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "rank")
        _check_strength(self)
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(f"targets={shown(list(self.targets))} must name at least one kernel, and each once")

    def describe(self) -> str:
        """Returns the adapters in words: `LoRA of rank 8 on q, v`."""
        return f"LoRA of rank {self.rank} on {', '.join(self.targets)}"

    def check_targets(self, known: tuple[str, ...]) -> None:
        """Raises `InputError` for a target that is none of `known`."""
        unknown = ", ".join(name for name in self.targets if name not in known)
        if unknown:
            raise InputError(f"LoRA targets {clipped(unknown)} do not exist here; there are {', '.join(known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNConfig:
    """A feed-forward network: gated (gate, up, down) or plain (up, down).

        >>> moe_jax.FFNConfig(dim=32).shapes(16)
        {'gate': (16, 32), 'up': (16, 32), 'down': (32, 16)}

    Attributes:
      dim: hidden width f.
      gated: `act(x G) * (x U) D` if true, else `act(x U) D`.
      activation: `silu`, `gelu`, `gelu_tanh`, `quick_gelu`, `relu`, `relu2`, which is its square, or what
        `functional.register_activation` has added. Only of gated FFNs `swiglu_clamped` (gpt-oss), which is `(u + 1) g
        sigmoid(1.702 g)` of g = x G up to 7 and of u = x U between -7 and 7.
      bias: whether every matrix has a bias.
      nf4: kernels are stored as NF4 and frozen. In a bank, this applies to its base, or to full kernels.
      lora: LoRA beside the kernels. In a bank, beside those of the base, or of every full expert.
    """

    dim: int
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    nf4: bool = False
    lora: LoRAConfig | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "dim")
        ACTIVATION_FUNCTIONS.check("activation", self.activation, others=GATED_ACTIVATIONS)
        if self.activation in GATED_ACTIVATIONS and not self.gated:
            raise InputError(f"activation {self.activation!r} is one of gated FFNs, and this one has no gate")
        if self.lora is not None:
            self.lora.check_targets(self.matrices)

    def describe(self) -> str:
        """Returns the FFN in words: `FFN of 1,536, gated silu`."""
        more = (", biases" if self.bias else "") + (", NF4" if self.nf4 else "")
        lora = "" if self.lora is None else f", {self.lora.describe()}"
        return f"FFN of {self.dim:,}, {'gated ' if self.gated else ''}{self.activation}{more}{lora}"

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of use."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """`[in, out]` shape of every kernel for model width `d_model`."""
        return {name: (self.dim, d_model) if name == "down" else (d_model, self.dim) for name in self.matrices}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoFFNConfig(FFNConfig):
    """No feed-forward network, in a layer that has attention, or what stands in its place, alone (Nemotron-H)."""

    dim: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.lora is not None:
            self.lora.check_targets(self.matrices)
        # Said of all layers of a model; of this one it means nothing.
        object.__setattr__(self, "nf4", False)

    def describe(self) -> str:
        """Returns the FFN in words: there is none."""
        return "no FFN"

    @property
    def matrices(self) -> tuple[str, ...]:
        """There are none."""
        return ()


Split = Literal["in", "out"]
Arrays = Mapping[str, Array]
Rows = Float[Array, "M w"]
"""Rows sorted by expert."""
GroupSizes = Int[Array, " E"]
"""The number of rows of every expert."""
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
