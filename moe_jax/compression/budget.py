"""The form and size that a budget leaves for every layer (methods.md 5).

Forms and sizes are tried on every layer (`trials`): how far each would move the experts. Of a large
layer only a sample of the neurons is used, in whole groups of 128: where groups of scales lie along the neurons, the
sample then has the same ones. Factorisations use all neurons.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.coding.coder import LeastError
from moe_jax.compression.coding.factorization import largest_singular_values
from moe_jax.compression.coding.pruning import mean_shares, prune, squared
from moe_jax.compression.coding.quantizer import quantize
from moe_jax.compression.coding.storage import disk_bytes
from moe_jax.compression.options.in_common import check_budget
from moe_jax.compression.source_layer import SourceLayer, aligned_experts, aligned_kernels, mean_kernel, neuron_rows
from moe_jax.core.code_options import DEFAULT_GROUP_SIZE
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig, BaseCodes
from moe_jax.experts.forms import JointLowRank, LowRank, Matrix, Sparse
from moe_jax.experts.forms.coding import Encodable, Residual, Wanted
from moe_jax.experts.forms.optional import SideBySide
from moe_jax.models import MoEConfig


class Candidate(NamedTuple):
    """One way to compress a layer."""

    nbytes: int  # size of the layer, compressed in this way
    error: float  # of the layer, compressed in this way; errors of layers are added up
    choice: Any = None  # whatever the caller needs to recognise it


def allocate(candidates: Mapping[int, Sequence[Candidate]], budget_bytes: int) -> dict[int, Candidate]:
    """Chooses one candidate per layer, so that their bytes are at most the budget; in the order of `candidates`.

    The sum of errors exceeds the least possible one by at most the gain of the first step that did not fit, which is
    next to nothing for many layers. A larger budget never gives a larger sum.

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


def total_error(chosen: Mapping[int, Candidate]) -> float:
    """Returns the error of all choices together."""
    return sum(candidate.error for candidate in chosen.values())


def total_bytes(chosen: Mapping[int, Candidate]) -> int:
    """Returns the bytes of all choices together."""
    return sum(candidate.nbytes for candidate in chosen.values())


def smallest(candidates: Mapping[int, Sequence[Candidate]]) -> dict[int, Candidate]:
    """Returns the smallest candidate for each."""
    return {key: min(some, key=lambda one: one.nbytes) for key, some in candidates.items()}


def ways(
    candidates: Mapping[int, Sequence[Candidate]],
    alike: Mapping[int, Sequence[Candidate]],
    room: int,
    of_maps: Mapping[int, Sequence[Candidate]] = MappingProxyType({}),
) -> list[dict[int, Candidate]]:
    """Returns what can be chosen in so many bytes: what `allocate` gives layers as they are, and with matrices alike.

    And every choice that is the same everywhere, if there is room for it: the best of all is never worse than those.

    `alike` are those with the same choice for all matrices of a layer, in the same order of choices in all layers.
    Linear maps have their own choices, in the same order in all of them, under keys that are no layers'.
    """
    found = [allocate({**some, **of_maps}, room) for some in (candidates, alike)]
    of_layers = [dict(zip(alike, same, strict=True)) for same in zip(*alike.values(), strict=True)] or [{}]
    of_rest = [dict(zip(of_maps, same, strict=True)) for same in zip(*of_maps.values(), strict=True)] or [{}]
    for same in ({**one, **other} for one in of_layers for other in of_rest):
        if total_bytes(same) <= room:
            found.append(same)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Room for the experts of all compressed layers, everything included; `InputError` unless it is above 0."""

    target_bytes: int | None = None  # of all layers together; or
    budget_bits: float | None = None  # for every weight that the experts have before the compression, on average
    sizes: tuple[Wanted, ...] = ()  # forms and sizes that a layer can get
    codes: BaseCodes | None = None  # of the centres; None: they have the dtype of the model

    def __post_init__(self) -> None:
        assert (self.target_bytes is None) != (self.budget_bits is None)
        check_budget(self.target_bytes, self.budget_bits)

    def nbytes(self, layers: Sequence[SourceLayer]) -> int:
        """The budget, in bytes."""
        if self.target_bytes is not None:
            return self.target_bytes
        assert self.budget_bits is not None
        return int(self.budget_bits * expert_weights(layers) / 8)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Raises `InputError` if the budget is below what the centres of the layers alone take."""
        centres = sum(
            _centre_bytes(self.codes, matrix, layer.dtype(name).itemsize)
            for layer in layers
            for name, matrix in layer.matrices.items()
        )
        if self.nbytes(layers) < centres:
            raise InputError(
                f"a budget of {self.nbytes(layers):,} bytes is below the {centres:,} bytes of the centres of "
                f"{len(layers)} layers alone, {8 * centres / expert_weights(layers):.2f} bits per expert weight; "
                "raise it or compress fewer layers"
            )

    def divide(
        self, layers: Sequence[SourceLayer], analyses: Mapping[int, Mapping[str, np.ndarray]]
    ) -> dict[int, MoEConfig]:
        """The new config of every layer, by index, so that the relative squared errors of all add up to little.

        Analyses have, for each size of the budget, what its trial found: `errors`, float[n], and `shares`, float[n, m].
        A budget below the smallest sizes of all layers is an `InputError`.
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


def _centre_bytes(codes: BaseCodes | None, matrix: Matrix, itemsize: int) -> int:
    if codes is None:
        return matrix.size * itemsize
    return codes.form.of_matrix(matrix).bytes(matrix, (), jnp.dtype(jnp.float32))


def expert_weights(layers: Sequence[SourceLayer]) -> int:
    """Weights of the experts of all layers."""
    return sum(layer.num_experts * math.prod(shape) for layer in layers for shape in layer.shapes.values())


SAMPLED_NEURONS = 2 * DEFAULT_GROUP_SIZE

Matrices = Mapping[str, Float[np.ndarray, "E i o"]]
"""Aligned kernels of all experts, or a part of their neurons."""


class Trial(NamedTuple):
    """The result of trying a form and size on a layer."""

    wanted: Wanted  # what was tried
    error: float  # ||W^ - W||^2 / ||W||^2 over all experts
    shares: Float[np.ndarray, " m"]  # of the matrices in the entries that stay, where these are needed; else zeros


def trials(
    layer: SourceLayer,
    permutations: Int[np.ndarray, "E f"],
    tried: Sequence[Wanted],
    *,
    refit: bool,
    codes: BaseCodes | None = None,
) -> list[Trial]:
    """Tries forms and sizes on a layer, around the mean of its aligned experts: a trial for each, in their order.

    With `refit`, the centre is refitted to what is pruned; to codes, it is not for a trial. Without codes of its own it
    has the dtype of the model.
    """
    sampled = _sampled(layer, permutations)
    centres = {name: mean_kernel(kernels) for name, kernels in sampled.items()}
    norm = sum(squared(kernels) for kernels in sampled.values()) or 1.0  # experts of zeros have no errors either
    side_by_side = [wanted for wanted in tried if issubclass(wanted.form, SideBySide)]
    factored = _factored_errors(layer, permutations, side_by_side, codes)
    stored = {name: _stored(centre, codes) for name, centre in centres.items()}
    nothing = np.zeros(len(sampled))
    found: list[Trial] = []
    pruned: dict[Wanted, _Remainder] = {}
    for wanted in tried:
        # Two forms have a shorter way: pruning is the same for all bits, and one decomposition serves all ranks.
        if wanted in factored:
            found.append(Trial(wanted, factored[wanted], nothing))
        elif wanted.form.counts_largest:
            of_floats = dataclasses.replace(wanted, bits=None)
            if of_floats not in pruned:
                pruned[of_floats] = _prune(sampled, centres, of_floats, codes, refit=refit)
            remainder = pruned[of_floats]
            found.append(Trial(wanted, remainder.error(sampled, wanted.bits) / norm, remainder.shares))
        else:
            found.append(Trial(wanted, _encoded_error(layer, sampled, stored, wanted) / norm, nothing))
    return found


class _Remainder(NamedTuple):
    """The sample after pruning: centres and masks by matrix, the squared error, and the shares."""

    centres: dict[str, np.ndarray]
    masks: dict[str, list[np.ndarray]]
    lost: float
    shares: np.ndarray

    def error(self, sampled: Matrices, bits: int | None) -> float:
        """With the error of the kept values in so many bits."""
        total = self.lost
        for name, kernels in sampled.items() if bits is not None else ():
            for kernel, mask in zip(kernels, self.masks[name], strict=True):
                kept = (kernel - self.centres[name])[mask]
                # Of one size whatever is kept, so that one program serves all trials.
                values = np.zeros((kernel.size, 1), np.float32)
                values[: kept.size, 0] = kept
                made = quantize(values, bits=bits, group_size=DEFAULT_GROUP_SIZE, count=kept.size)
                total += squared(np.asarray(made.approximation)[: kept.size, 0] - kept)
        return total


def _prune(
    sampled: Matrices, centres: Mapping[str, np.ndarray], wanted: Wanted, codes: BaseCodes | None, *, refit: bool
) -> _Remainder:
    shares = np.zeros(len(sampled))
    if wanted.needs_shares:
        experts = range(len(sampled["up"]))
        each = ({name: kernels[expert].copy() for name, kernels in sampled.items()} for expert in experts)
        shares = mean_shares(each, centres, wanted.keep or 1.0)
    counts = Sparse.counts_for(wanted, [kernels[0].size for kernels in sampled.values()], shares.tolist())
    refitted = {
        name: prune(lambda kernels=kernels: iter(kernels), centres[name], count, refit=refit)
        for (name, kernels), count in zip(sampled.items(), counts, strict=True)
    }
    stored = {name: _stored(found.centre, codes) for name, found in refitted.items()}
    lost = sum(found.error for found in refitted.values())
    if codes is not None:
        lost = sum(
            squared((kernel - stored[name])[~mask])
            for name, kernels in sampled.items()
            for kernel, mask in zip(kernels, refitted[name].masks, strict=True)
        )
    return _Remainder(stored, {name: found.masks for name, found in refitted.items()}, lost, shares)


def _stored(centre: np.ndarray, codes: BaseCodes | None) -> np.ndarray:
    """The centre that its codes stand for."""
    return centre if codes is None else codes.form.stored(centre, Matrix("", centre.shape), LeastError())[1]


def _encoded_error(layer: SourceLayer, sampled: Matrices, centres: Mapping[str, np.ndarray], wanted: Wanted) -> float:
    form, total = layer.wanted(wanted), 0.0
    assert isinstance(form, Encodable)
    for name, kernels in sampled.items():
        matrix = dataclasses.replace(layer.matrices[name], shape=kernels.shape[1:])
        for kernel in kernels:
            residual = kernel - centres[name]
            given = Residual(residual, np.dtype(np.float32), centres[name])
            total += squared(np.asarray(form.encode(given, matrix, LeastError())[1]) - residual)
    return total


def _factored_errors(
    layer: SourceLayer, permutations: Int[np.ndarray, "E f"], tried: Sequence[Wanted], codes: BaseCodes | None
) -> dict[Wanted, float]:
    """||W^ - W||^2 / ||W||^2 of low-rank forms, from one decomposition of the residuals for all ranks of a design."""
    ranks: dict[str, dict[Wanted, int]] = {}
    for wanted in tried:
        form = layer.wanted(wanted)
        assert isinstance(form, LowRank | JointLowRank)
        ranks.setdefault(wanted.design, {})[wanted] = form.rank
    errors = {}
    for design, of_design in ranks.items():
        means = {name: mean_kernel(aligned_kernels(layer, name, permutations)) for name in layer.shapes}
        centres = {name: _stored(mean, codes) for name, mean in means.items()}
        spectra, of_residuals, of_kernels = [], 0.0, 0.0
        for expert in aligned_experts(layer, permutations):
            of_kernels += sum(map(squared, expert.values()))
            residuals = [neuron_rows(name, kernel - centres[name]) for name, kernel in expert.items()]
            for part in [np.concatenate(residuals, axis=1)] if design == "concat" else residuals:
                of_residuals += squared(part)
                spectra.append(largest_singular_values(part, max(of_design.values())))
        for wanted, rank in of_design.items():
            kept = sum(float(np.sum(spectrum[:rank].astype(np.float64) ** 2)) for spectrum in spectra)
            errors[wanted] = max(0.0, of_residuals - kept) / of_kernels
    return errors


def _sampled(layer: SourceLayer, permutations: Int[np.ndarray, "E f"]) -> dict[str, np.ndarray]:
    """Kernels with some blocks of neurons, spread evenly; all of a small layer. Float32[E, in, out] each."""
    f = permutations.shape[1]
    chosen = np.arange(f)
    if f > 2 * SAMPLED_NEURONS:
        blocks = f // DEFAULT_GROUP_SIZE
        first = np.linspace(0, blocks - 1, SAMPLED_NEURONS // DEFAULT_GROUP_SIZE).astype(int) * DEFAULT_GROUP_SIZE
        chosen = (first[:, None] + np.arange(DEFAULT_GROUP_SIZE)).reshape(-1)
    return {name: np.stack(list(aligned_kernels(layer, name, permutations[:, chosen]))) for name in layer.shapes}
