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


BANK_KINDS = ("full", "low-rank", "joint-low-rank", "sparse", "quantized")
BASES = ("shared", "none")
PLACES = ("csr", "bitmap", "coo")
BITS = (8, 4, 3, 2, 1)
VALUE_BITS = (8, 4, 3, 2)
# Which kinds a field belongs to; of the first kind in `_REQUIRED` it has to be given.
_KINDS = {
    "rank": ("low-rank", "joint-low-rank"),
    "rate": ("sparse",),
    "entries": ("sparse",),
    "bits": ("quantized", "sparse"),
    "group_size": ("quantized", "sparse"),
}
_REQUIRED = {"low-rank": "rank", "joint-low-rank": "rank", "sparse": "rate", "quantized": "bits"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankConfig:
    """What the experts of a layer are made of (METHODS 2.1-2.3, 4, 5).

    Attributes:
      kind: `full` kernels, or a shared base plus `low-rank`, `joint-low-rank`, `sparse` or `quantized` deltas. Joint
        are the factors of a whole expert, its design matrix, of which the one over the neurons is stored once.
      base: `none`: the deltas are the experts, and no base is stored.
      rank: rank r of low-rank deltas.
      rate: share of entries that a sparse delta leaves out, in [0, 1).
      entries: entries that a sparse delta keeps of every kernel, or of each in the order of `FFNConfig.matrices`;
        None: `round(d * f * (1 - rate))`.
      places: how a sparse delta says where its entries are: `csr`, a `bitmap`, or flat positions (`coo`).
      bits: of a code of a quantised delta: 8, 4, 3, 2 or 1; of a value of a sparse one, None: not quantised.
      group_size: entries along the input axis that share a scale of a quantised delta; None: the whole kernel. Of a
        sparse one with bits: consecutive values that do; None: all.
      train_base: whether the shared base is trained.
    """

    kind: Literal["full", "low-rank", "joint-low-rank", "sparse", "quantized"] = "full"
    base: Literal["shared", "none"] = "shared"
    rank: int | None = None
    rate: float | None = None
    entries: int | tuple[int, ...] | None = None
    places: Literal["csr", "bitmap", "coo"] = "csr"
    bits: int | None = None
    group_size: int | None = None
    train_base: bool = True

    def __post_init__(self) -> None:
        check_member("bank kind", self.kind, BANK_KINDS)
        check_member("base", self.base, BASES)
        check_member("places", self.places, PLACES)
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if (value is not None and self.kind not in kinds) or (value is None and _REQUIRED.get(self.kind) == name):
                raise InputError(
                    f"{name}={value} does not go with bank kind {self.kind!r}: {' and '.join(kinds)} have a {name}"
                )
        if self.rank is not None and self.rank < 1:
            raise InputError(f"rank={self.rank} must be at least 1")
        if self.rate is not None and not 0.0 <= self.rate < 1.0:
            raise InputError(f"rate={self.rate} must lie in [0, 1): it is the share of entries left out")
        if self.entries is not None and min(self._counts(), default=0) < 1:
            raise InputError(f"entries={self.entries} must be at least 1")
        bits = BITS if self.kind == "quantized" else VALUE_BITS
        if self.bits is not None and self.bits not in bits:
            raise InputError(f"bits={self.bits} must be one of {', '.join(map(str, bits))}")
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            # Codes of whole bytes, or of three of them at three bits, then never have two scales.
            raise InputError(f"group_size={self.group_size} must be a multiple of 8, or null for one per kernel")

    @property
    def has_base(self) -> bool:
        """Whether there are base kernels."""
        return self.kind != "full" and self.base == "shared"

    def for_matrix(self, index: int) -> "BankConfig":
        """The same for one matrix of the FFN, by its index in `FFNConfig.matrices`: `entries` is a number or None."""
        if not isinstance(self.entries, tuple):
            return self
        return dataclasses.replace(self, entries=self.entries[index])

    def nonzeros(self, shape: tuple[int, int]) -> int:
        """Entries that a sparse delta keeps of a kernel of `shape`; of a config for one matrix."""
        assert self.rate is not None and not isinstance(self.entries, tuple)
        return self.entries if self.entries is not None else round(math.prod(shape) * (1.0 - self.rate))

    def check_fits(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raises `InputError` if a delta of this kind makes no sense for kernels of these shapes."""
        if isinstance(self.entries, tuple) and len(self.entries) != len(shapes):
            raise InputError(f"entries={self.entries} is not one for each of {', '.join(shapes)}")
        for index, (name, shape) in enumerate(shapes.items()):
            if self.rank is not None and self.kind == "low-rank" and self.rank > min(shape):
                raise InputError(f"rank {self.rank} is above min(d, f) = {min(shape)} of the {name} kernel {shape}")
            if self.rate is not None and self.for_matrix(index).nonzeros(shape) < 1:
                raise InputError(f"rate {self.rate} leaves no entry of the {name} kernel {shape}; lower it")
            if self.rate is not None and self.for_matrix(index).nonzeros(shape) > math.prod(shape):
                raise InputError(f"entries={self.entries} is above the size of the {name} kernel {shape}")

    def _counts(self) -> tuple[int, ...]:
        return self.entries if isinstance(self.entries, tuple) else (self.entries or 0,)
