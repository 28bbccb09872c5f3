"""`allocate`: codes for every layer, with a shared centre or without, as many bits as it is worth (methods.md 5).

The divergence of the model's predictions is predicted as the sum over layers of *sensitivity* times the error of their
experts' outputs (`calibration.sensitivity_pass`). The errors of all candidates are measured on some columns of every
matrix: with error feedback, too, the columns of a kernel are coded each on its own.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from moe_jax.compress.alignment.barycenter import SOLVERS
from moe_jax.compress.alignment.design_matrix import aligned_kernels, mean_kernel, unaligned
from moe_jax.compress.allocation.budget import Budget, BudgetBits, TargetBytes
from moe_jax.compress.allocation.knapsack import Candidate, allocate
from moe_jax.compress.calibration.expert_coders import expert_coders
from moe_jax.compress.calibration.sensitivity_pass import output_error
from moe_jax.compress.coding.coder import LeastError
from moe_jax.compress.coding.schemes import DEFAULT_GROUP_SIZE
from moe_jax.compress.coding.storage import QUANTIZED, disk_bytes
from moe_jax.compress.coding.write_experts import write_experts
from moe_jax.compress.layer_figures import LayerFigures
from moe_jax.compress.methods.delta_base import BARYCENTER, Base
from moe_jax.compress.methods.interface import Analysis, Method, Tick, check_calibrated
from moe_jax.compress.methods.resmoe import IDENTITY, aligned, in_order
from moe_jax.compress.source_layer import SourceLayer, Write
from moe_jax.errors import InputError, check_member
from moe_jax.experts import BankConfig, BaseCodes, forms
from moe_jax.models import MoEConfig

# Bits of the centre, None without one, and bits of the codes of every expert.
CHOICES: tuple[tuple[int | None, int], ...] = (
    *((None, bits) for bits in (2, 3, 4, 8)),
    *((2, bits) for bits in (1, 2)),
    *((3, bits) for bits in (1, 2)),
    *((4, bits) for bits in (1, 2, 3, 4)),
    *((8, bits) for bits in (2, 3, 4)),
)
_COLUMNS = 128


def never_worse(candidates: Mapping[int, Sequence[Candidate]], room: int) -> dict[int, Candidate]:
    """What `allocate` gives layers, or if that is better the same choice for all of them.

    Args:
      candidates: by layer, all in the same order of choices.
      room: bytes of all layers.

    Raises:
      InputError: see `allocate`.
    """
    ways = [allocate(candidates, room)]
    for same in zip(*candidates.values(), strict=True):
        if sum(candidate.nbytes for candidate in same) <= room:
            ways.append(dict(zip(candidates, same, strict=True)))
    return min(ways, key=lambda way: sum(candidate.error for candidate in way.values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocate(Method):
    """Codes with a shared centre or without, of as many bits for every layer as --calibrate says that it is worth.

    Attributes:
      budget_bits: bits per weight of the experts of all compressed layers, everything included.
      target_bytes: the same in bytes; one of both.
      group_size: entries along the input axis that share a scale.
      solver: of the alignment around a centre, see `barycenter`; `identity` takes the neurons as they are.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("budget_bits", (2.0, 2.5, 3.0, 4.0))
    forms: ClassVar[tuple[str, ...]] = QUANTIZED
    origin: ClassVar[str | None] = BARYCENTER
    needs_calibration: ClassVar[bool] = True
    needs_sensitivities: ClassVar[bool] = True

    budget_bits: float | None = None
    target_bytes: int | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    solver: Literal["auto", "alternation", "assignment", "sinkhorn", "identity"] = "auto"

    def __post_init__(self) -> None:
        check_member("solver", self.solver, (*SOLVERS, IDENTITY))
        if (self.budget_bits is None) == (self.target_bytes is None):
            raise InputError("allocate needs --budget-bits or --target-bytes, and not both")
        self.budget  # noqa: B018  (checks both)
        self._bank(4, 2)  # checks the group size

    @functools.cached_property
    def budget(self) -> Budget:
        """Room for all layers together."""
        if self.target_bytes is not None:
            return TargetBytes(target=self.target_bytes, schemes=())
        assert self.budget_bits is not None
        return BudgetBits(bits=self.budget_bits, schemes=())

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """See `Method`. Also that the smallest candidates are within the budget."""
        check_calibrated(layers)
        nothing_known = [0.0] * len(CHOICES)
        allocate({layer.index: list(self._candidates(layer, nothing_known)) for layer in layers}, self._room(layers))

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """See `Method`. Aligns the experts, and tries all choices on some columns of their matrices."""
        began = time.monotonic()
        found = in_order(layer) if self.solver == IDENTITY else aligned(layer, self.solver, tick)
        errors = sum(self._errors(layer, name, found["permutations"]) for name in layer.shapes)
        return found | {"errors": np.asarray(errors), "seconds": np.asarray(time.monotonic() - began)}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """See `Method`."""
        candidates = {}
        for layer in layers:
            assert layer.calibration is not None
            sensitivity = layer.calibration.sensitivity
            if sensitivity is None:
                raise InputError(f"layer {layer.index}: the calibration does not say how much depends on it")
            candidates[layer.index] = list(self._candidates(layer, sensitivity * analyses[layer.index]["errors"]))
        return {index: chosen.choice for index, chosen in never_worse(candidates, self._room(layers)).items()}

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """See `Method`."""
        began = time.monotonic()
        shared = target.bank.has_base
        orders = analysis["permutations"] if shared else unaligned(layer)
        measure = write_experts(layer, target.bank, orders, write, refit=False)
        return measure.figures(
            seconds=float(analysis["seconds"]) + time.monotonic() - began, choice=target.bank.describe()
        )

    def _room(self, layers: Sequence[SourceLayer]) -> int:
        return self.budget.nbytes(layers)

    def _bank(self, centre: int | None, bits: int) -> BankConfig:
        form = forms.Quantized(bits=bits, group_size=self.group_size)
        if centre is None:
            return BankConfig(form, base="none")
        codes = BaseCodes(code=str(centre), group_size=self.group_size)  # type: ignore[arg-type]
        return BankConfig(form, base_codes=codes)

    def _candidates(self, layer: SourceLayer, errors: Sequence[float] | np.ndarray) -> Iterator[Candidate]:
        d_model, dtype = layer.shapes["up"][0], layer.dtype("up")
        for choice, error in zip(CHOICES, errors, strict=True):
            target = layer.target(self._bank(*choice))
            yield Candidate(disk_bytes(target, d_model, dtype), float(error), target)

    def _errors(self, layer: SourceLayer, name: str, permutations: np.ndarray) -> np.ndarray:
        """The error of a matrix's outputs for every choice, relative and squared."""
        width = layer.shapes[name][1]
        columns = np.unique(np.linspace(0, width - 1, min(width, _COLUMNS)).astype(int))
        kernels = [kernel[:, columns] for kernel in aligned_kernels(layer, name, permutations)]
        mean = mean_kernel(kernels)
        centres: dict[int | None, np.ndarray] = {None: np.zeros((1, 1), np.float32)}
        for bits in {centre for centre, _ in CHOICES if centre is not None}:
            centres[bits] = LeastError().quantize(mean, bits=bits, group_size=self.group_size).approximation
        errors, norm = np.zeros(len(CHOICES)), 0.0
        for kernel, coder in zip(kernels, expert_coders(layer, name, permutations), strict=True):
            moment = coder.moment
            assert moment is not None
            norm += float(np.sum(kernel * (moment @ kernel), dtype=np.float64))
            for number, (centre, bits) in enumerate(CHOICES):
                residual = kernel - centres[centre]
                made = coder.quantize(residual, bits=bits, group_size=self.group_size).approximation
                difference = made - residual
                errors[number] += float(np.sum(difference * (moment @ difference), dtype=np.float64))
        return np.array([output_error(error, norm) for error in errors])
