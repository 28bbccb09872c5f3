"""The scheme that every layer gets: the same for all, or what a budget leaves for it (methods.md 5)."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from moe_jax.compression.allocation.knapsack import Candidate, allocate
from moe_jax.compression.coding.centre import centre_bytes
from moe_jax.compression.coding.schemes import Design, LowRank, Pruned, Quantized, Scheme
from moe_jax.compression.coding.storage import disk_bytes
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.experts import BaseCodes
from moe_jax.experts.forms.quantized import BITS
from moe_jax.models import FFNConfig, MoEConfig

# What is tried under a budget.
KEEPS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
BITS_OF_VALUES = (None, 8, 4)
SVD_KEEPS = (0.05, 0.1, 0.15, 0.2, 0.25)


def same_scheme(
    layers: Sequence[SourceLayer],
    scheme: Scheme,
    analyses: Mapping[int, Mapping[str, np.ndarray]],
    *,
    base: Literal["shared", "none"],
    codes: BaseCodes | None = None,
) -> dict[int, MoEConfig]:
    """What layers become, by index, if all of them get one scheme. Layers of equal shape stay equal.

    Args:
      layers: as they are.
      scheme: of their experts.
      analyses: by index; where the scheme needs them, with `shares` of the matrices, float[m], as `mean_shares` gives
        them. They are averaged over layers of one shape.
      base: whether there is a centre.
      codes: of the centre; None: it has the dtype of the model.
    """
    shares: dict[FFNConfig, list[np.ndarray]] = {}
    for layer in layers if scheme.needs_shares else ():
        shares.setdefault(layer.moe.expert, []).append(analyses[layer.index]["shares"])
    means = {expert: np.mean(found, axis=0).tolist() for expert, found in shares.items()}
    banks = {
        layer.index: scheme.bank(layer.moe.expert, layer.shapes["up"][0], base=base, shares=means.get(layer.moe.expert))
        for layer in layers
    }
    return {layer.index: layer.target(dataclasses.replace(banks[layer.index], base_codes=codes)) for layer in layers}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(abc.ABC):
    """Room for the experts of all compressed layers, everything included.

    Attributes:
      schemes: that a layer can get.
      codes: of the centres; None: they have the dtype of the model.
    """

    schemes: tuple[Scheme, ...]
    codes: BaseCodes | None = None

    @abc.abstractmethod
    def nbytes(self, layers: Sequence[SourceLayer]) -> int:
        """The budget, in bytes."""

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Raises `InputError` if the budget is below what the centres of the layers alone take."""
        centres = sum(
            centre_bytes(self.codes, matrix, layer.dtype(name).itemsize)
            for layer in layers
            for name, matrix in layer.matrices.items()
        )
        if self.nbytes(layers) < centres:
            raise InputError(
                f"a budget of {self.nbytes(layers):,} bytes is below the {centres:,} bytes of the centres of "
                f"{len(layers)} layers alone, {8 * centres / _weights(layers):.2f} bits per expert weight; "
                "raise it or compress fewer layers"
            )

    def divide(
        self, layers: Sequence[SourceLayer], analyses: Mapping[int, Mapping[str, np.ndarray]]
    ) -> dict[int, MoEConfig]:
        """What every layer becomes, by index, so that the relative squared errors of all add up to little.

        Args:
          layers: as they are.
          analyses: by index, for each scheme of the budget what its trial found: `errors`, float[n], and `shares`,
            float[n, m].

        Raises:
          InputError: if the budget is below the smallest schemes of all layers.
        """
        candidates: dict[int, list[Candidate]] = {}
        for layer in layers:
            d_model, dtype = layer.shapes["up"][0], layer.dtype("up")
            candidates[layer.index] = []
            errors, shares_of_schemes = analyses[layer.index]["errors"], analyses[layer.index]["shares"]
            for scheme, error, shares in zip(self.schemes, errors, shares_of_schemes, strict=True):
                bank = scheme.bank(layer.moe.expert, d_model, base="shared", shares=shares)
                target = layer.target(dataclasses.replace(bank, base_codes=self.codes))
                candidates[layer.index].append(Candidate(disk_bytes(target, d_model, dtype), float(error), target))
        return {index: chosen.choice for index, chosen in allocate(candidates, self.nbytes(layers)).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetBytes(Budget):
    """So many bytes.

    Attributes:
      target: of all layers together.
    """

    target: int

    def __post_init__(self) -> None:
        _check_positive("target_bytes", self.target)

    def nbytes(self, layers: Sequence[SourceLayer]) -> int:
        """See `Budget`."""
        return self.target


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetBits(Budget):
    """So many bits per weight of the experts, on average.

    Attributes:
      bits: for every weight that there is before the compression.
    """

    bits: float

    def __post_init__(self) -> None:
        _check_positive("budget_bits", self.bits)

    def nbytes(self, layers: Sequence[SourceLayer]) -> int:
        """See `Budget`."""
        return int(self.bits * _weights(layers) / 8)


def schemes_to_try(kinds: Sequence[type[Scheme]], design: Design) -> tuple[Scheme, ...]:
    """Schemes of some kinds, from next to nothing to everything kept."""
    every: list[Scheme] = []
    every += [Pruned(keep=keep, bits=bits, design=design) for keep in KEEPS for bits in BITS_OF_VALUES]
    every += [LowRank(keep=keep, design=design) for keep in SVD_KEEPS]
    every += [Quantized(bits=bits) for bits in BITS]
    return tuple(scheme for scheme in every if type(scheme) in kinds)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(f"{name}={value:g} must be above 0")


def _weights(layers: Sequence[SourceLayer]) -> int:
    """Weights of the experts of all layers."""
    return sum(layer.num_experts * math.prod(shape) for layer in layers for shape in layer.shapes.values())
