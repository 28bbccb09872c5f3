"""The experts of a layer written in the form of a bank: a shared base, residuals from it, and biases (methods.md 4, 5).

A base in codes is not the one that was asked for, but residuals are taken from what is stored, so that they make up
for its error as far as their own codes go.

*Refit*: once the residuals have their approximations D_e, the best base is the mean of W_e - D_e. It is encoded in
turn, and then the residuals again. With 8 Gaussian experts, a base of 4 bits and residuals of 2, this gains 13 % of
the squared error, and 18 % if done twice, where the residuals have 0.72 of the variance of the experts. Where they have
0.074 of it, the grid of the base is coarser than what it would be moved by, and the gain is 0.2 %.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from moe_jax.compression.calibration.expert_statistics import weighted_tokens
from moe_jax.compression.coding.coder import (
    ExpertCoder,
    LeastError,
    LeastJointError,
    expert_coders,
    joint_moments,
    shared_base_coder,
)
from moe_jax.compression.coding.learnt_rounding import Expert, learn_rounding, start_of
from moe_jax.compression.coding.pruning import prune
from moe_jax.compression.report import Measure
from moe_jax.compression.source_layer import (
    SourceLayer,
    Write,
    aligned_biases,
    aligned_experts,
    aligned_kernels,
    mean_kernel,
    neuron_rows,
)
from moe_jax.experts import BankConfig
from moe_jax.experts.forms import KernelForm, Matrix, Quantized
from moe_jax.experts.forms.coding import ByExpert, CodedJointly, Coder, Encodable, Residual, experts_with, own_of

REFITS = 2
# What one refit has to gain of the error, for another to be tried.
_LEAST_GAIN = 0.01

Made = tuple[Mapping[str, np.ndarray], np.ndarray | Array]
"""The leaves that store a residual, and the float32 [in, out] that they stand for."""


class SharedBase(NamedTuple):
    """The base of one matrix, as it is stored, and the kernel [in, out] that its leaves stand for."""

    leaves: Mapping[str, np.ndarray]
    kernel: np.ndarray

    def write(self, name: str, write: Write) -> None:
        """Writes the leaves of the base of the matrix `name`."""
        for leaf, array in self.leaves.items():
            write(f"experts/base/{name}/{leaf}", array)


class Coded(NamedTuple):
    """One matrix of all experts, coded: the leaves of the residuals are stacked over the experts, by name."""

    base: SharedBase | None
    leaves: dict[str, np.ndarray]
    measure: Measure


def write_experts(
    layer: SourceLayer,
    bank: BankConfig,
    write: Write,
    *,
    permutations: Int[np.ndarray, "E f"] | None = None,
    base: Callable[[str], np.ndarray] | None = None,
    encode: Callable[[str, int, Residual, ExpertCoder], Made] | None = None,
    refit: bool = False,
    fit: bool = True,
    feedback: bool = True,
    even: bool = False,
    coder: ExpertCoder | None = None,
    learnt_steps: int | None = None,
) -> Measure:
    """Writes the experts of a layer in the form of a bank; returns the measure of the errors of all matrices.

    Memory holds one matrix of all experts; of aligned ones in float32.

    Args:
      layer, bank: the experts as they are, and what they become.
      permutations: the order of every expert's neurons; None: as they are stored.
      base: returns the shared base of a matrix, [in, out], if there is one; None: the mean of the kernels.
      encode: `encode(matrix, expert, residual, coder)` codes a residual; None: as the form of the bank does.
      refit: the base is refitted to what a sparse bank leaves out; in codes, to the codes of the residuals.
      fit, even: see `LeastError`.
      feedback: see `LeastOutputError`; of a layer that was calibrated.
      coder: of all kernels; None: those of `expert_coders`, or of matrices that are encoded together `LeastJointError`.
      learnt_steps: steps in which the rounding of codes is learnt (`learnt_rounding`); None: it is not. Memory then
        holds all matrices.
    """
    form, measure = bank.form, Measure(layer.num_experts, layer.moe.expert.dim)
    assert isinstance(form, KernelForm)

    def coder_of_base(name: str) -> ExpertCoder:
        """For the least change of outputs, or the least error where residuals make up for it, or it has no codes."""
        if bank.base_codes is None or _codes_all_entries(form, layer.matrices[name]):
            return LeastError(fit=fit)
        return shared_base_coder(layer, name, permutations, feedback=feedback, even=even)

    if isinstance(form, CodedJointly):
        assert permutations is not None
        _write_jointly(layer, bank, form, permutations, write, measure, coder_of_base)
    elif learnt_steps is not None:
        coders = partial(expert_coders, layer, fit=fit, feedback=False, even=even)
        _write_learnt(layer, bank, base, coders, coder_of_base, write, measure, steps=learnt_steps)
    else:
        for name in layer.shapes:
            coders = partial(expert_coders, layer, name, permutations, fit=fit, feedback=feedback, even=even)
            if coder is not None:
                coders = partial(itertools.repeat, coder, layer.num_experts)
            _write_matrix(
                layer, bank, name, permutations, base, coders, coder_of_base, encode, write, measure, refit=refit
            )
    for name in layer.shapes:
        biases = aligned_biases(layer, name, permutations)
        if biases is not None:
            write(f"experts/{name}/bias", biases)
    return measure


def _write_matrix(
    layer: SourceLayer,
    bank: BankConfig,
    name: str,
    permutations: Int[np.ndarray, "E f"] | None,
    base_of: Callable[[str], np.ndarray] | None,
    coders: Callable[[], Iterable[ExpertCoder]],
    coder_of_base: Callable[[str], ExpertCoder],
    encode: Callable[[str, int, Residual, ExpertCoder], Made] | None,
    write: Write,
    measure: Measure,
    *,
    refit: bool,
) -> None:
    form, matrix, masks, base = bank.form, layer.matrices[name], None, None
    assert isinstance(form, KernelForm)
    kernels: Callable[[], Iterable[np.ndarray]] = partial(layer.kernels, name)
    if permutations is not None:
        kernels = list(aligned_kernels(layer, name, permutations)).__iter__  # gone through again and again
        layer.forget()
    if bank.has_base_of(name):
        base = mean_kernel(kernels()) if base_of is None else base_of(name)
    if encode is None:
        assert isinstance(form, Encodable | ByExpert), form
        count = form.kept_entries(matrix) if isinstance(form, Encodable) else None
        if count is not None:
            start = np.broadcast_to(np.zeros((1, 1), np.float32) if base is None else base, matrix.shape)
            importances = None if not layer.knows_inputs else [coder.importances for coder in coders()]
            pruned = prune(kernels, start, count, refit=refit and base is not None, importances=importances)
            masks, base = pruned.masks, None if base is None else pruned.centre

    def by_form(expert: int, residual: Residual, coder: ExpertCoder) -> Made:
        own = own_of(form, expert)
        assert isinstance(own.form, Encodable)
        if masks is not None:  # entries that were chosen by their inputs are coded one by one
            return own.form.encode(residual._replace(kept=masks[expert]), matrix, LeastError())
        leaves, made = own.form.encode(residual, matrix, coder)
        return {own.folder + leaf: array for leaf, array in leaves.items()}, made

    # A base in the model's dtype stays what it is, and one for entries that are kept or left out was refitted to these.
    # The codes of a calibrated layer are not those of least error, for which the mean would be the best base.
    may_refit = refit and bank.base_codes is not None and _codes_all_entries(form, matrix) and not layer.knows_inputs
    of_base = LeastError() if base is None else coder_of_base(name)
    coded = code_residuals(
        kernels,
        base,
        lambda base: stored_base(layer, bank, name, base, of_base),
        coders,
        by_form if encode is None else partial(encode, name),
        lambda: Measure(layer.num_experts, layer.moe.expert.dim),
        num_experts=layer.num_experts,
        dtype=layer.dtype(name),
        refits=REFITS if may_refit else 0,
    )
    if coded.base is not None:
        coded.base.write(name, write)
    for leaf, array in coded.leaves.items():
        # Of a leaf that not all experts have, the rest is not filled in.
        write(f"experts/delta/{name}/{leaf}", array[experts_with(form, leaf)])
    measure.include(coded.measure)


def _write_jointly(
    layer: SourceLayer,
    bank: BankConfig,
    form: CodedJointly,
    permutations: Int[np.ndarray, "E f"],
    write: Write,
    measure: Measure,
    coder_of_base: Callable[[str], ExpertCoder],
) -> None:
    """One expert after another, all of its matrices at once."""
    bases: dict[str, np.ndarray] = {}
    for name in filter(bank.has_base_of, layer.shapes):
        base = mean_kernel(aligned_kernels(layer, name, permutations))
        stored = stored_base(layer, bank, name, base, coder_of_base(name))
        stored.write(name, write)
        bases[name] = stored.kernel
    stacked: dict[str, np.ndarray] = {}
    next_moments = joint_moments(layer, permutations).__next__
    for expert, aligned in enumerate(aligned_experts(layer, permutations)):
        moments = next_moments()
        kernels = {name: neuron_rows(name, kernel) for name, kernel in aligned.items()} if bases else None
        coder = LeastJointError(moments, kernels)
        residuals = aligned | {name: aligned[name] - base.astype(np.float32) for name, base in bases.items()}
        leaves, approximations = form.encode_expert(residuals, layer.matrices, layer.dtype("up"), coder)
        del residuals
        _stack(stacked, leaves, expert, layer.num_experts)
        for name, kernel in aligned.items():
            measure.add(expert, kernel, bases.get(name), approximations[name], moments.get(name))
        del coder, moments  # they are large: before the next ones are made
    for path, array in stacked.items():
        write(f"experts/delta/{path}", array)


def _write_learnt(
    layer: SourceLayer,
    bank: BankConfig,
    base_of: Callable[[str], np.ndarray] | None,
    coders_of: Callable[[str], Iterable[ExpertCoder]],
    coder_of_base: Callable[[str], ExpertCoder],
    write: Write,
    measure: Measure,
    *,
    steps: int,
) -> None:
    """One expert after another, all of its matrices at once: their rounding is learnt together."""
    form, bases = bank.form, dict.fromkeys(layer.shapes)
    assert isinstance(form, Quantized)
    forms = {name: form.of_matrix(matrix) for name, matrix in layer.matrices.items()}
    for name in filter(bank.has_base_of, layer.shapes):
        base = mean_kernel(layer.kernels(name)) if base_of is None else base_of(name)
        stored = stored_base(layer, bank, name, base, coder_of_base(name))
        stored.write(name, write)
        bases[name] = stored.kernel.astype(np.float32)
    biases = {name: own for name in layer.shapes if (own := layer.biases(name)) is not None}
    stacked: dict[str, dict[str, np.ndarray]] = {name: {} for name in layer.shapes}
    experts = zip(*map(layer.kernels, layer.shapes), strict=True)
    for expert, (found, coders) in enumerate(
        zip(experts, zip(*map(coders_of, layer.shapes), strict=True), strict=True)
    ):
        kernels = {name: kernel.astype(np.float32) for name, kernel in zip(layer.shapes, found, strict=True)}
        starts = {}
        for name, coder in zip(layer.shapes, coders, strict=True):
            values = kernels[name] if bases[name] is None else kernels[name] - bases[name]
            leaves, _ = forms[name].encode(Residual(values, layer.dtype(name)), layer.matrices[name], coder)
            starts[name] = start_of(leaves, values, forms[name], bases[name])
        own = {name: bias[expert].astype(np.float32) for name, bias in biases.items()}
        whole = Expert(kernels, own, layer.moe.expert.activation)
        learnt = learn_rounding(whole, starts, forms, weighted_tokens(layer, expert), steps=steps)
        for name, coder in zip(layer.shapes, coders, strict=True):
            leaves, made = jax.tree.map(np.asarray, learnt[name])
            _stack(stacked[name], leaves, expert, layer.num_experts)
            measure.add(expert, kernels[name], bases[name], made, coder.moment)
    for name, leaves in stacked.items():
        for leaf, array in leaves.items():
            write(f"experts/delta/{name}/{leaf}", array)


def stored_base(layer: SourceLayer, bank: BankConfig, name: str, base: np.ndarray, coder: Coder) -> SharedBase:
    """The base [in, out] of a matrix as a bank stores it. Raises `InputError` if a number is too large for it."""
    if bank.base_codes is None:
        kernel = layer.stored(name, base)
        return SharedBase({"kernel": kernel}, kernel)
    return SharedBase(*bank.base_codes.form.stored(base, layer.matrices[name], coder))


def code_residuals(
    kernels: Callable[[], Iterable[np.ndarray]],
    base: np.ndarray | None,
    store: Callable[[np.ndarray], SharedBase],
    coders: Callable[[], Iterable[ExpertCoder]],
    encode: Callable[[int, Residual, ExpertCoder], Made],
    measure: Callable[[], Measure],
    *,
    num_experts: int,
    dtype: np.dtype,
    refits: int = 0,
) -> Coded:
    """Codes one matrix of all experts around a base, refitted as long as that helps: the round of least squared error.

    Without a base [in, out], kernels are coded themselves. `kernels` and `coders` give those of all experts as often as
    they are called; `store` makes a base what is stored of it, `encode` codes the residual of an expert, and floating-
    point leaves of the residuals have `dtype`.
    """
    best: Coded | None = None
    for refit in range(refits + 1):
        stored, stacked, figures = None if base is None else store(base), {}, measure()
        wide = np.zeros((), np.float32) if stored is None else stored.kernel.astype(np.float32, copy=False)
        total = np.float32(0)
        next_coder = iter(coders()).__next__
        for expert, kernel in enumerate(kernels()):
            coder = next_coder()
            residual = Residual(kernel.astype(np.float32, copy=False) - wide, dtype, None if stored is None else wide)
            leaves, approximation = encode(expert, residual, coder)
            _stack(stacked, leaves, expert, num_experts)
            moment = coder.moment
            del coder  # with the factor of its moment, which is as large
            figures.add(expert, kernel, None if stored is None else stored.kernel, approximation, moment)
            del moment  # before the next one is made
            if refit < refits:
                total = total + (kernel.astype(np.float32, copy=False) - np.asarray(approximation))
        found = Coded(stored, stacked, figures)
        before = np.inf if best is None else best.measure.squared_error
        if figures.squared_error < before or best is None:
            best = found
        if figures.squared_error > before * (1 - _LEAST_GAIN):
            break
        base = np.asarray(total / np.float32(num_experts))
    assert best is not None
    return best


def _stack(stacked: dict[str, np.ndarray], leaves: Mapping[str, np.ndarray], expert: int, experts: int) -> None:
    for name, leaf in leaves.items():
        if name not in stacked:
            stacked[name] = np.empty((experts, *leaf.shape), leaf.dtype)
        stacked[name][expert] = leaf


def _codes_all_entries(form: KernelForm, matrix: Matrix) -> bool:
    """Whether residuals in this form have a code for every entry."""
    return form.has_codes and not (isinstance(form, Encodable) and form.kept_entries(matrix) is not None)
