"""Schemes of coding tried on one layer: how far each would move the experts (methods.md 5).

Of a large layer only a sample of the neurons is used, in whole groups of 128: where groups of scales lie along the
neurons, the sample then has the same ones. Factorisations use all neurons.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.alignment.design_matrix import aligned_experts, aligned_kernels, mean_kernel, neuron_rows
from moe_jax.compression.coding.coder import LeastError
from moe_jax.compression.coding.pruning import concat_counts, prune, squared
from moe_jax.compression.coding.quantizer import quantize
from moe_jax.compression.coding.truncated_svd import truncated_svd
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.threads import ahead
from moe_jax.experts import BaseCodes
from moe_jax.experts.forms import JointLowRank, LowRank, Matrix, Sparse
from moe_jax.experts.forms.coding import DEFAULT_GROUP_SIZE, Encodable, Residual, Wanted
from moe_jax.experts.forms.optional import SideBySide

SAMPLED_NEURONS = 2 * DEFAULT_GROUP_SIZE

Matrices = Mapping[str, Float[np.ndarray, "E i o"]]
"""Aligned kernels of all experts, or a part of their neurons."""


class Trial(NamedTuple):
    """The result of trying a form and size on a layer.

    Attributes:
      wanted: what was tried.
      error: ||W^ - W||^2 / ||W||^2 over all experts.
      shares: of the matrices in the entries that stay, where these are needed; else zeros.
    """

    wanted: Wanted
    error: float
    shares: Float[np.ndarray, " m"]


def trials(
    layer: SourceLayer,
    permutations: Int[np.ndarray, "E f"],
    tried: Sequence[Wanted],
    *,
    refit: bool,
    codes: BaseCodes | None = None,
) -> list[Trial]:
    """Tries forms and sizes on a layer, around the mean of its aligned experts.

    Args:
      layer: its experts.
      permutations: the order of every expert's neurons.
      tried: the forms and sizes.
      refit: the centre is refitted to what is pruned; to codes, it is not for a trial.
      codes: of the centre; None: it has the dtype of the model.

    Returns:
      One trial for each of `tried`, in that order.

    Raises:
      InputError: if a weight is not finite.
    """
    sampled = _sampled(layer, permutations)
    centres = {name: mean_kernel(kernels) for name, kernels in sampled.items()}
    norm = sum(squared(kernels) for kernels in sampled.values()) or 1.0  # experts of zeros have no errors either
    factored = _Factored(
        layer, permutations, [wanted for wanted in tried if issubclass(wanted.form, SideBySide)], codes
    )
    stored = {name: _stored(centre, codes) for name, centre in centres.items()}
    nothing = np.zeros(len(sampled))
    found: list[Trial] = []
    pruned: dict[Wanted, _Remainder] = {}
    for wanted in tried:
        # Two forms have a shorter way: pruning is the same for all bits, and one decomposition serves all ranks.
        if issubclass(wanted.form, SideBySide):
            found.append(Trial(wanted, factored.error(wanted), nothing))
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


def mean_shares(
    experts: Iterable[Mapping[str, np.ndarray]], centres: Mapping[str, np.ndarray], keep: float
) -> Float[np.ndarray, " m"]:
    """Share of every matrix in the largest residuals of an expert, averaged over the experts.

    Args:
      experts: the aligned kernels of each; they are overwritten.
      centres: of the matrices.
      keep: share of all entries that stays.
    """
    shares = []
    for magnitudes in ahead(_magnitudes(kernels, centres) for kernels in experts):
        counts = concat_counts(magnitudes, keep)
        shares.append(np.array(list(counts.values())) / sum(counts.values()))
    return np.mean(shares, axis=0)


def _magnitudes(kernels: Mapping[str, np.ndarray], centres: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Returns the magnitudes of residuals, in the place of the kernels: two experts in memory are enough."""
    for name, kernel in kernels.items():
        np.abs(np.subtract(kernel, centres[name], out=kernel), out=kernel)
    return kernels


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


class _Factored:
    """Singular values of the residuals of all neurons, once for all ranks of a design."""

    def __init__(
        self,
        layer: SourceLayer,
        permutations: Int[np.ndarray, "E f"],
        tried: Sequence[Wanted],
        codes: BaseCodes | None,
    ):
        self._layer, self._permutations, self._tried, self._codes = layer, permutations, tried, codes
        self._spectra: dict[str, tuple[list[np.ndarray], float]] = {}
        self._norm = 0.0

    def error(self, wanted: Wanted) -> float:
        """||W^ - W||^2 / ||W||^2."""
        if wanted.design not in self._spectra:
            self._spectra[wanted.design] = self._compute(wanted.design)
        spectra, norm = self._spectra[wanted.design]
        rank = self._rank(wanted)
        kept = sum(float(np.sum(spectrum[:rank].astype(np.float64) ** 2)) for spectrum in spectra)
        return max(0.0, norm - kept) / self._norm

    def _rank(self, wanted: Wanted) -> int:
        form = self._layer.wanted(wanted)
        assert isinstance(form, LowRank | JointLowRank)
        return form.rank

    def _compute(self, design: str) -> tuple[list[np.ndarray], float]:
        """The largest singular values of all residuals, and the squared norm of these."""
        layer, permutations = self._layer, self._permutations
        means = {name: mean_kernel(aligned_kernels(layer, name, permutations)) for name in layer.shapes}
        centres = {name: _stored(mean, self._codes) for name, mean in means.items()}
        rank = max(self._rank(wanted) for wanted in self._tried if wanted.design == design)
        spectra, norm, self._norm = [], 0.0, 0.0
        for expert in aligned_experts(layer, permutations):
            self._norm += sum(map(squared, expert.values()))
            residuals = [neuron_rows(name, kernel - centres[name]) for name, kernel in expert.items()]
            for part in [np.concatenate(residuals, axis=1)] if design == "concat" else residuals:
                norm += squared(part)
                spectra.append(truncated_svd(part, rank)[1])
        return spectra, norm


def _sampled(layer: SourceLayer, permutations: Int[np.ndarray, "E f"]) -> dict[str, np.ndarray]:
    """Kernels with some blocks of neurons, spread evenly; all of a small layer. Float32[E, in, out] each."""
    f = permutations.shape[1]
    chosen = np.arange(f)
    if f > 2 * SAMPLED_NEURONS:
        blocks = f // DEFAULT_GROUP_SIZE
        first = np.linspace(0, blocks - 1, SAMPLED_NEURONS // DEFAULT_GROUP_SIZE).astype(int) * DEFAULT_GROUP_SIZE
        chosen = (first[:, None] + np.arange(DEFAULT_GROUP_SIZE)).reshape(-1)
    return {name: np.stack(list(aligned_kernels(layer, name, permutations[:, chosen]))) for name in layer.shapes}
