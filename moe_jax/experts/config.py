"""What an expert is, what a bank of experts is made of, and what small modules stand beside them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from moe_jax.errors import InputError, check_member, check_positive
from moe_jax.functional.ffn import ACTIVATION_FUNCTIONS


def _check_dropout(config: object) -> None:
    if not 0.0 <= config.dropout < 1.0:
        raise InputError(f"dropout={config.dropout} must lie in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A bottleneck, `scale * act(h Down) Up` (METHODS 6, 7): LoRA's shape, or a parallel or sequential adapter's.

    Attributes:
      rank: width r of the bottleneck.
      activation: `none` (LoRA), or a key of `functional.ffn.ACTIVATION_FUNCTIONS`.
      scale: s; of LoRA α/r.
      dropout: share of the entries of `h` set to zero in training.
      of_base: it belongs to the model that others stand beside, and is frozen with it.
    """

    rank: int
    activation: Literal["none", "silu", "gelu", "gelu_tanh", "relu"] = "none"
    scale: float = 1.0
    dropout: float = 0.0
    of_base: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "rank")
        check_member("activation", self.activation, ("none", *ACTIVATION_FUNCTIONS))
        _check_dropout(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Products `scale * (x A) B` beside some of a module's kernels (Hu et al. 2021).

    Attributes:
      rank: r.
      targets: the kernels, by the names that they have in the module.
      scale: α/r.
      dropout: share of the entries of `x` set to zero in training.
    """

    rank: int
    targets: tuple[str, ...]
    scale: float = 2.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "rank")
        _check_dropout(self)
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(f"targets={list(self.targets)} must name at least one kernel, and each once")

    def check_targets(self, known: tuple[str, ...]) -> None:
        """Raises `InputError` for a target that is none of `known`."""
        unknown = [name for name in self.targets if name not in known]
        if unknown:
            raise InputError(f"LoRA targets {', '.join(unknown)} do not exist here; there are {', '.join(known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNConfig:
    """A feed-forward network: gated (gate, up, down) or plain (up, down).

    Attributes:
      dim: hidden width f.
      gated: `act(x G) * (x U) D` if true, else `act(x U) D`.
      activation: a key of `functional.ffn.ACTIVATION_FUNCTIONS`.
      bias: biases on every matrix.
      nf4: kernels are kept as NF4 codes and frozen. Of the experts of a bank: its base, or full kernels.
      lora: of a bank over a shared base, beside the base; of full experts, beside every expert's kernels.
    """

    dim: int
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    bias: bool = False
    nf4: bool = False
    lora: LoRAConfig | None = None

    def __post_init__(self) -> None:
        check_positive(self, "dim")
        check_member("activation", self.activation, tuple(ACTIVATION_FUNCTIONS))
        if self.lora is not None:
            self.lora.check_targets(self.matrices)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of use."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """`[in, out]` shape of every kernel for model width `d_model`."""
        return {name: (self.dim, d_model) if name == "down" else (d_model, self.dim) for name in self.matrices}


BANK_KINDS = ("full", "low-rank", "joint-low-rank", "sparse", "quantized", "adapter")
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
    "adapter": ("adapter",),
}
_REQUIRED = {
    "low-rank": "rank",
    "joint-low-rank": "rank",
    "sparse": "rate",
    "quantized": "bits",
    "adapter": "adapter",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankConfig:
    """What the experts of a layer are made of (METHODS 2.1-2.3, 4, 5, 6).

    Attributes:
      kind: `full` kernels, or a shared base plus `low-rank`, `joint-low-rank`, `sparse` or `quantized` deltas. Joint
        are the factors of a whole expert, its design matrix, of which the one over the neurons is stored once.
        `adapter`: the base is applied once, and the experts are adapters after it.
      base: `none`: the deltas are the experts, and no base is stored.
      rank: rank r of low-rank deltas.
      rate: share of entries that a sparse delta leaves out, in [0, 1).
      entries: entries that a sparse delta keeps of every kernel, or of each in the order of `FFNConfig.matrices`;
        None: `round(d * f * (1 - rate))`.
      places: how a sparse delta says where its entries are: `csr`, a `bitmap`, or flat positions (`coo`).
      bits: of a code of a quantised delta: 8, 4, 3, 2 or 1; of a value of a sparse one, None: not quantised.
      group_size: entries along the input axis that share a scale of a quantised delta; None: the whole kernel. Of a
        sparse one with bits: consecutive values that do; None: all.
      adapter: of adapter experts.
      train_base: whether the shared base is trained.
    """

    kind: Literal["full", "low-rank", "joint-low-rank", "sparse", "quantized", "adapter"] = "full"
    base: Literal["shared", "none"] = "shared"
    rank: int | None = None
    rate: float | None = None
    entries: int | tuple[int, ...] | None = None
    places: Literal["csr", "bitmap", "coo"] = "csr"
    bits: int | None = None
    group_size: int | None = None
    adapter: AdapterConfig | None = None
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
        if self.kind == "adapter" and self.base == "none":
            raise InputError("adapter experts come after a shared FFN, and base 'none' leaves it out")
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

    @property
    def has_kernels(self) -> bool:
        """Whether there are kernels, full or of a base: deltas that are all there is have none."""
        return self.kind == "full" or self.has_base

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
