"""Every form of residual tried on one layer: what each would leave of the experts (METHODS 5).

Of a large layer a sample of the neurons is looked at. They come in whole groups of scales, so that quantisation along
the neurons is seen as it is. Only factorisations need all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compress.alignment.design_matrix import aligned_experts, aligned_kernels, mean_kernel, neuron_rows
from moe_jax.compress.coding.pruning import common_counts, concat_counts, kept_entries, prune, squared
from moe_jax.compress.coding.quantizer import quantize
from moe_jax.compress.coding.schemes import DEFAULT_GROUP_SIZE, RESIDUALS, Form, joint_rank, separate_rank
from moe_jax.compress.coding.truncated_svd import truncated_svd
from moe_jax.compress.source_layer import SourceLayer

KEEPS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
SVD_KEEPS = (0.05, 0.1, 0.15, 0.2, 0.25)
SAMPLED_NEURONS = 2 * DEFAULT_GROUP_SIZE

Matrices = Mapping[str, Float[np.ndarray, "E i o"]]
"""Aligned kernels of all experts, or a part of their neurons."""


class Trial(NamedTuple):
    """What a form would make of a layer.

    Attributes:
      form: it.
      error: ||W^ - W||^2 / ||W||^2 over all experts.
      shares: of the matrices in the entries that stay, where the form needs them; else zeros.
    """

    form: Form
    error: float
    shares: Float[np.ndarray, " m"]


def forms(residual: str | None, design: str, refit: bool) -> list[Form]:
    """What is tried: all forms, or those of one kind of residual."""
    every = [
        Form(residual="up", keep=keep, bits=bits, design=design, refit=refit) for keep in KEEPS for bits in (None, 8, 4)
    ]
    every += [Form(residual="svd", keep=keep, design=design) for keep in SVD_KEEPS]
    every += [Form(residual="quantized", bits=bits) for bits in (8, 4, 3, 2, 1)]
    assert {form.residual for form in every} == set(RESIDUALS)
    return [form for form in every if residual in (None, form.residual)]


def trials(layer: SourceLayer, permutations: Int[np.ndarray, "E f"], tried: Sequence[Form]) -> list[Trial]:
    """Tries forms on a layer; in the order of `tried`.

    Raises:
      InputError: if a weight is not finite.
    """
    sampled = _sampled(layer, permutations)
    centres = {name: mean_kernel(kernels) for name, kernels in sampled.items()}
    norm = sum(squared(kernels) for kernels in sampled.values())
    factored = _Factored(layer, permutations, max((f.keep for f in tried if f.residual == "svd"), default=0.0))
    nothing = np.zeros(len(sampled))
    found: list[Trial] = []
    pruned: dict[tuple[float, str, bool], _Pruned] = {}
    for form in tried:
        if form.residual == "quantized":
            found.append(Trial(form, _quantized_error(sampled, centres, form.bits) / norm, nothing))
        elif form.residual == "svd":
            found.append(Trial(form, factored.error(form), nothing))
        else:
            key = (form.keep, form.design, form.refit)
            if key not in pruned:  # the same for all bits
                pruned[key] = _prune(sampled, centres, form)
            found.append(Trial(form, pruned[key].error(sampled, form.bits) / norm, pruned[key].shares))
    return found


class _Pruned(NamedTuple):
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


def _prune(sampled: Matrices, centres: Mapping[str, np.ndarray], form: Form) -> _Pruned:
    assert form.keep is not None
    sizes = {name: kernels[0].size for name, kernels in sampled.items()}
    shares = np.zeros(len(sizes))
    if form.needs_shares:
        experts = range(len(sampled["up"]))
        each = ({name: kernels[expert] for name, kernels in sampled.items()} for expert in experts)
        shares = mean_shares(each, centres, form.keep)
        counts = dict(zip(sizes, common_counts(shares, list(sizes.values()), form.keep), strict=True))
    else:
        counts = {name: kept_entries(size, form.keep) for name, size in sizes.items()}
    refitted = {
        name: prune(lambda kernels=kernels: iter(kernels), centres[name], counts[name], refit=form.refit)
        for name, kernels in sampled.items()
    }
    return _Pruned(
        {name: found.centre for name, found in refitted.items()},
        {name: found.masks for name, found in refitted.items()},
        sum(found.error for found in refitted.values()),
        shares,
    )


def mean_shares(
    experts: Iterable[Mapping[str, np.ndarray]], centres: Mapping[str, np.ndarray], keep: float
) -> Float[np.ndarray, " m"]:
    """Share of every matrix in the largest residuals of an expert, averaged over the experts.

    Args:
      experts: the aligned kernels of each.
      centres: of the matrices.
      keep: share of all entries that stays.
    """
    shares = []
    for kernels in experts:
        counts = concat_counts({name: kernel - centres[name] for name, kernel in kernels.items()}, keep)
        shares.append(np.array(list(counts.values())) / sum(counts.values()))
    return np.mean(shares, axis=0)


def _quantized_error(sampled: Matrices, centres: Mapping[str, np.ndarray], bits: int | None) -> float:
    total = 0.0
    for name, kernels in sampled.items():
        for kernel in kernels:
            residual = kernel - centres[name]
            made = quantize(residual, bits=bits, group_size=DEFAULT_GROUP_SIZE)
            total += squared(np.asarray(made.approximation) - residual)
    return total


class _Factored:
    """Singular values of the residuals of all neurons, once for all ranks."""

    def __init__(self, layer: SourceLayer, permutations: Int[np.ndarray, "E f"], most: float):
        self._layer, self._permutations, self._most = layer, permutations, most
        self._spectra: dict[str, tuple[list[np.ndarray], float]] = {}
        self._norm = 0.0

    def error(self, form: Form) -> float:
        """||W^ - W||^2 / ||W||^2."""
        if form.design not in self._spectra:
            self._spectra[form.design] = self._compute(form)
        spectra, norm = self._spectra[form.design]
        rank = self._rank(form.design, form.keep)
        kept = sum(float(np.sum(spectrum[:rank].astype(np.float64) ** 2)) for spectrum in spectra)
        return max(0.0, norm - kept) / self._norm

    def _rank(self, design: str, keep: float) -> int:
        expert, d_model = self._layer.moe.expert, self._layer.shapes["up"][0]
        rank = joint_rank(keep, expert, d_model) if design == "concat" else separate_rank(keep, expert, d_model)
        return min(rank, expert.dim, (len(self._layer.shapes) if design == "concat" else 1) * d_model)

    def _compute(self, form: Form) -> tuple[list[np.ndarray], float]:
        """The largest singular values of all residuals, and the squared norm of these."""
        layer, permutations = self._layer, self._permutations
        centres = {name: mean_kernel(aligned_kernels(layer, name, permutations)) for name in layer.shapes}
        rank = self._rank(form.design, self._most)
        spectra, norm, self._norm = [], 0.0, 0.0
        for expert in aligned_experts(layer, permutations):
            self._norm += sum(map(squared, expert.values()))
            residuals = [neuron_rows(name, kernel - centres[name]) for name, kernel in expert.items()]
            parts = [np.concatenate(residuals, axis=1)] if form.design == "concat" else residuals
            for part in parts:
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
