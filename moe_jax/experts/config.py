"""What an expert is, and what a bank of experts is made of."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from moe_jax.errors import InputError, check_member, check_positive
from moe_jax.functional.ffn import ACTIVATION_FUNCTIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNConfig:
    """A feed-forward network: gated (gate, up, down) or plain (up, down).

    Attributes:
      dim: hidden width f.
      gated: `act(x G) * (x U) D` if true, else `act(x U) D`.
      activation: a key of `functional.ffn.ACTIVATION_FUNCTIONS`.
      bias: biases on every matrix.
    """

    dim: int
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "dim")
        check_member("activation", self.activation, tuple(ACTIVATION_FUNCTIONS))

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of use."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """`[in, out]` shape of every kernel for model width `d_model`."""
        return {name: (self.dim, d_model) if name == "down" else (d_model, self.dim) for name in self.matrices}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankConfig:
    """What the experts of a layer are made of (METHODS 2.1-2.3).

    Attributes:
      kind: `full` kernels, or a shared base plus `low-rank` or `sparse` deltas.
      rank: rank r of low-rank deltas.
      rate: share of entries that a sparse delta leaves out, in [0, 1).
      train_base: whether the shared base is trained.
    """

    kind: Literal["full", "low-rank", "sparse"] = "full"
    rank: int | None = None
    rate: float | None = None
    train_base: bool = True

    def __post_init__(self) -> None:
        check_member("bank kind", self.kind, ("full", "low-rank", "sparse"))
        if (self.kind == "low-rank") != (self.rank is not None):
            raise InputError(f"rank={self.rank} does not go with bank kind {self.kind!r}: only 'low-rank' has a rank")
        if (self.kind == "sparse") != (self.rate is not None):
            raise InputError(f"rate={self.rate} does not go with bank kind {self.kind!r}: only 'sparse' has a rate")
        if self.rank is not None and self.rank < 1:
            raise InputError(f"rank={self.rank} must be at least 1")
        if self.rate is not None and not 0.0 <= self.rate < 1.0:
            raise InputError(f"rate={self.rate} must lie in [0, 1): it is the share of entries left out")

    def nonzeros(self, shape: tuple[int, int]) -> int:
        """Entries that a sparse delta keeps of a kernel of `shape`: round(d * f * (1 - rate))."""
        assert self.rate is not None
        return round(math.prod(shape) * (1.0 - self.rate))

    def check_fits(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raises `InputError` if a delta of this kind makes no sense for kernels of these shapes."""
        for name, shape in shapes.items():
            if self.rank is not None and self.rank > min(shape):
                raise InputError(f"rank {self.rank} is above min(d, f) = {min(shape)} of the {name} kernel {shape}")
            if self.rate is not None and self.nonzeros(shape) < 1:
                raise InputError(f"rate {self.rate} leaves no entry of the {name} kernel {shape}; lower it")
