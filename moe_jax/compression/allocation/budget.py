"""The form and size that every layer gets: the same for all, or what a budget leaves for it (methods.md 5)."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from moe_jax.compression.allocation.knapsack import Candidate, allocate
from moe_jax.compression.coding.shared_base import base_bytes
from moe_jax.compression.coding.storage import disk_bytes
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig, BaseCodes
from moe_jax.experts.forms.optional.coding import Wanted
from moe_jax.models import FFNConfig, MoEConfig


def all_alike(
    layers: Sequence[SourceLayer],
    wanted: Wanted,
    analyses: Mapping[int, Mapping[str, np.ndarray]],
    *,
    base: Literal["shared", "none"],
    codes: BaseCodes | None = None,
) -> dict[int, MoEConfig]:
    """Returns the new config of every layer, by index, if all get the same. Layers of equal shape stay equal.

    Args:
      layers: as they are.
      wanted: the form of their experts, and how much stays.
      analyses: by index; where that is needed, with `shares` of the matrices, float[m], as `mean_shares` gives
        them. They are averaged over layers of one shape.
      base: whether experts share a base.
      codes: of the centre; None: it has the dtype of the model.
    """
    shares: dict[FFNConfig, list[np.ndarray]] = {}
    for layer in layers if wanted.needs_shares else ():
        shares.setdefault(layer.moe.expert, []).append(analyses[layer.index]["shares"])
    means = {expert: np.mean(found, axis=0).tolist() for expert, found in shares.items()}
    banks = {
        layer.index: BankConfig(layer.wanted(wanted, means.get(layer.moe.expert)), base=base, base_codes=codes)
        for layer in layers
    }
    return {layer.index: layer.target(banks[layer.index]) for layer in layers}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(abc.ABC):
    """Room for the experts of all compressed layers, everything included.

    Attributes:
      sizes: forms and sizes that a layer can get.
      codes: of the centres; None: they have the dtype of the model.
    """

    sizes: tuple[Wanted, ...]
    codes: BaseCodes | None = None

    @abc.abstractmethod
    def nbytes(self, layers: Sequence[SourceLayer]) -> int:
        """The budget, in bytes."""

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Raises `InputError` if the budget is below what the centres of the layers alone take."""
        centres = sum(
            base_bytes(self.codes, matrix, layer.dtype(name).itemsize)
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
        """Returns the new config of every layer, by index, so that the relative squared errors of all add up to little.

        Args:
          layers: as they are.
          analyses: by index, for each size of the budget what its trial found: `errors`, float[n], and `shares`,
            float[n, m].

        Raises:
          InputError: if the budget is below the smallest sizes of all layers.
        """
        candidates: dict[int, list[Candidate]] = {}
        for layer in layers:
            d_model, dtype = layer.shapes["up"][0], layer.dtype("up")
            candidates[layer.index] = []
            found = analyses[layer.index]
            for wanted, error, shares in zip(self.sizes, found["errors"], found["shares"], strict=True):
                target = layer.target(BankConfig(layer.wanted(wanted, shares), base_codes=self.codes))
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
        return int(self.bits * _weights(layers) / 8)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(f"{name}={value:g} must be above 0")


def _weights(layers: Sequence[SourceLayer]) -> int:
    """Weights of the experts of all layers."""
    return sum(layer.num_experts * math.prod(shape) for layer in layers for shape in layer.shapes.values())
