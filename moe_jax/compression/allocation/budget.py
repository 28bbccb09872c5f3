"""The form and size that every layer gets: the same for all, or what a budget leaves for it (methods.md 5)."""

import abc
import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from moe_jax.compression.coding.shared_base import base_bytes
from moe_jax.compression.coding.storage import disk_bytes
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig, BaseCodes
from moe_jax.experts.forms.coding import Wanted
from moe_jax.models import FFNConfig, MoEConfig


class Candidate(NamedTuple):
    """One way to compress a layer.

    Attributes:
      nbytes: size of the layer, compressed in this way.
      error: of the layer, compressed in this way; errors of layers are added up.
      choice: whatever the caller needs to recognise it.
    """

    nbytes: int
    error: float
    choice: Any = None


def allocate(candidates: Mapping[int, Sequence[Candidate]], budget_bytes: int) -> dict[int, Candidate]:
    """Chooses one candidate per layer.

    The sum of errors exceeds the least possible one by at most the gain of the first step that did not fit, which is
    next to nothing for many layers. A larger budget never gives a larger sum.

    Args:
      candidates: by layer, in any order.
      budget_bytes: for all layers together.

    Returns:
      By layer, in the order of `candidates`; their bytes are at most the budget.

    Raises:
      InputError: if even the smallest candidates of all layers are too large.
    """
    chosen = {layer: min(some, key=lambda c: (c.nbytes, c.error)) for layer, some in candidates.items()}
    left = budget_bytes - sum(candidate.nbytes for candidate in chosen.values())
    if left < 0:
        raise InputError(
            f"a budget of {budget_bytes:,} bytes is too small for the experts of {len(chosen)} layers: "
            f"they take at least {budget_bytes - left:,} bytes"
        )
    better = {layer: list(some) for layer, some in candidates.items()}
    steps: list[tuple[float, int, Candidate]] = []

    def push_steepest(layer: int) -> None:
        """The step to the next vertex of the hull, among what is better than the present choice and fits."""
        now = chosen[layer]
        better[layer] = [c for c in better[layer] if c.error < now.error and 0 < c.nbytes - now.nbytes <= left]
        if better[layer]:
            slopes = [(now.error - c.error) / (c.nbytes - now.nbytes) for c in better[layer]]
            steepest = max(slopes)
            heapq.heappush(steps, (-steepest, layer, better[layer][slopes.index(steepest)]))

    for layer in candidates:
        push_steepest(layer)
    while steps:
        _, layer, to = heapq.heappop(steps)
        cost = to.nbytes - chosen[layer].nbytes
        if cost <= left:
            chosen[layer] = to
            left -= cost
        push_steepest(layer)
    return chosen


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
