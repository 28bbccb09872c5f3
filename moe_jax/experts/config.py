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


BANK_KINDS = ("full", "low-rank", "sparse", "quantized")
BITS = (8, 4, 2, 1)
# Which field belongs to which kind, and has to be given for it.
_REQUIRED = {"rank": "low-rank", "rate": "sparse", "bits": "quantized"}
_OPTIONAL = {"entries": "sparse", "group_size": "quantized"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankConfig:
    """What the experts of a layer are made of (METHODS 2.1-2.3, 4).

    Attributes:
      kind: `full` kernels, or a shared base plus `low-rank`, `sparse` or `quantized` deltas.
      rank: rank r of low-rank deltas.
      rate: share of entries that a sparse delta leaves out, in [0, 1).
      entries: entries that a sparse delta keeps of every kernel; None: `round(d * f * (1 - rate))`.
      bits: of a code of a quantised delta: 8, 4, 2 or 1.
      group_size: entries along the input axis that share a scale of a quantised delta; None: the whole kernel.
      train_base: whether the shared base is trained.
    """

    kind: Literal["full", "low-rank", "sparse", "quantized"] = "full"
    rank: int | None = None
    rate: float | None = None
    entries: int | None = None
    bits: int | None = None
    group_size: int | None = None
    train_base: bool = True

    def __post_init__(self) -> None:
        check_member("bank kind", self.kind, BANK_KINDS)
        for name, kind in (_REQUIRED | _OPTIONAL).items():
            value = getattr(self, name)
            if (value is not None and self.kind != kind) or (value is None and self.kind == _REQUIRED.get(name)):
                raise InputError(
                    f"{name}={value} does not go with bank kind {self.kind!r}: only {kind!r} has a {name}"
                )
        if self.rank is not None and self.rank < 1:
            raise InputError(f"rank={self.rank} must be at least 1")
        if self.rate is not None and not 0.0 <= self.rate < 1.0:
            raise InputError(f"rate={self.rate} must lie in [0, 1): it is the share of entries left out")
        if self.entries is not None and self.entries < 1:
            raise InputError(f"entries={self.entries} must be at least 1")
        if self.bits is not None and self.bits not in BITS:
            raise InputError(f"bits={self.bits} must be one of {', '.join(map(str, BITS))}")
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            # A byte of codes, eight at one bit, then never has two scales.
            raise InputError(f"group_size={self.group_size} must be a multiple of 8, or null for one per kernel")

    def nonzeros(self, shape: tuple[int, int]) -> int:
        """Entries that a sparse delta keeps of a kernel of `shape`."""
        assert self.rate is not None
        return self.entries if self.entries is not None else round(math.prod(shape) * (1.0 - self.rate))

    def check_fits(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raises `InputError` if a delta of this kind makes no sense for kernels of these shapes."""
        for name, shape in shapes.items():
            if self.rank is not None and self.rank > min(shape):
                raise InputError(f"rank {self.rank} is above min(d, f) = {min(shape)} of the {name} kernel {shape}")
            if self.rate is not None and self.nonzeros(shape) < 1:
                raise InputError(f"rate {self.rate} leaves no entry of the {name} kernel {shape}; lower it")
            if self.entries is not None and self.entries > math.prod(shape):
                raise InputError(f"entries={self.entries} is above the size of the {name} kernel {shape}")
