"""The experts of a layer written in the form of a bank: base, residuals and biases (methods.md 5)."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from jaxtyping import Int

from moe_jax.compression.alignment.design_matrix import (
    aligned_biases,
    aligned_experts,
    aligned_kernels,
    mean_kernel,
    neuron_rows,
)
from moe_jax.compression.coding.coder import LeastError, LeastJointError
from moe_jax.compression.coding.expert_coders import ExpertCoder, expert_coders, joint_moments, shared_base_coder
from moe_jax.compression.coding.pruning import prune
from moe_jax.compression.coding.shared_base import REFITS, code_residuals, stack, stored_base, write_base
from moe_jax.compression.layer_figures import Measure
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.experts import BankConfig
from moe_jax.experts.forms import KernelForm, Matrix
from moe_jax.experts.forms.coding import ByExpert, CodedJointly, Encodable, Residual, experts_with, own_of

CODER = LeastError()


def write_experts(
    layer: SourceLayer,
    bank: BankConfig,
    permutations: Int[np.ndarray, "E f"],
    write: Write,
    *,
    refit: bool,
    feedback: bool = True,
    even: bool = False,
    coder: ExpertCoder | None = None,
) -> Measure:
    """Writes the experts of a layer in the form of a bank, around a shared base if it has one.

    Args:
      layer: the experts as they are.
      bank: what they become.
      permutations: the order of every expert's neurons.
      write: takes the leaves.
      refit: the base is refitted to what a sparse bank leaves out; in codes, to the codes of the residuals.
      feedback: see `LeastOutputError`; of a layer that was calibrated.
      even: see `LeastError`.
      coder: of all kernels; None: those of `expert_coders`. Matrices that are encoded together
        have another, see `LeastJointError`.

    Returns:
      The measure, to which the errors of all matrices were added.

    Raises:
      InputError: if a weight is not finite.
    """
    measure = Measure(layer.num_experts, layer.moe.expert.dim)

    form = bank.form
    assert isinstance(form, KernelForm)
    of_base = partial(coder_of_base, layer, bank, permutations=permutations, feedback=feedback, even=even)
    if isinstance(form, CodedJointly):
        _write_jointly(layer, bank, form, permutations, write, measure, of_base)
    else:
        for name in layer.shapes:
            coders = partial(expert_coders, layer, name, permutations, feedback=feedback, even=even)
            if coder is not None:
                coders = partial(itertools.repeat, coder, layer.num_experts)
            _write_matrix(layer, bank, form, name, permutations, write, measure, coders, of_base, refit=refit)
    for name in layer.shapes:
        biases = aligned_biases(layer, name, permutations)
        if biases is not None:
            write(f"experts/{name}/bias", biases)
    return measure


def _write_matrix(
    layer: SourceLayer,
    bank: BankConfig,
    form: KernelForm,
    name: str,
    permutations: Int[np.ndarray, "E f"],
    write: Write,
    measure: Measure,
    coders: Callable[[], Iterable[ExpertCoder]],
    of_base: Callable[[str], ExpertCoder],
    *,
    refit: bool,
) -> None:
    dtype, matrix = layer.dtype(name), layer.matrices[name]
    kernels = list(aligned_kernels(layer, name, permutations))  # gone through again and again
    layer.forget()
    assert isinstance(form, Encodable | ByExpert), form
    has_base = bank.has_base_of(name)
    base = mean_kernel(kernels) if has_base else np.zeros((1, 1), np.float32)
    count, masks = form.kept_entries(matrix) if isinstance(form, Encodable) else None, None
    if count is not None:
        start = np.broadcast_to(base, matrix.shape)
        importances = None if layer.rows is None else [coder.importances for coder in coders()]
        pruned = prune(lambda: kernels, start, count, refit=refit and has_base, importances=importances)
        masks = pruned.masks
        base = pruned.centre if has_base else base

    def encode(expert: int, residual: Residual, coder: ExpertCoder) -> tuple[dict[str, np.ndarray], np.ndarray]:
        own = own_of(form, expert)
        assert isinstance(own.form, Encodable)
        if masks is None:
            leaves, made = own.form.encode(residual, matrix, coder)
            return {own.folder + leaf: array for leaf, array in leaves.items()}, made
        # Entries that were chosen by their inputs are coded one by one.
        return own.form.encode(residual._replace(kept=masks[expert]), matrix, CODER)

    chosen = of_base(name) if has_base else CODER
    coded = code_residuals(
        lambda: kernels,
        base if has_base else None,
        lambda base: stored_base(layer, bank, name, base, chosen),
        coders,
        encode,
        lambda: Measure(layer.num_experts, layer.moe.expert.dim),
        num_experts=layer.num_experts,
        dtype=dtype,
        refits=refits_for(layer, bank, matrix) if refit else 0,
    )
    # Of a leaf that not all experts have, the rest is not filled in.
    coded = coded._replace(leaves={leaf: array[experts_with(form, leaf)] for leaf, array in coded.leaves.items()})
    coded.write(name, write)
    measure.include(coded.measure)


def coder_of_base(
    layer: SourceLayer,
    bank: BankConfig,
    name: str,
    *,
    permutations: Int[np.ndarray, "E f"] | None = None,
    rounded: LeastError = CODER,
    feedback: bool = True,
    even: bool = False,
) -> ExpertCoder:
    """Returns the coder of a shared base: for the least change of outputs, or `rounded` where residuals make up for it.

    Args:
      layer: of the experts.
      bank: what they become.
      name: of the matrix.
      permutations, feedback, even: see `shared_base_coder`.
      rounded: also for a base without codes.

    Raises:
      InputError: if a weight is not finite.
    """
    form = bank.form
    assert isinstance(form, KernelForm)
    if bank.base_codes is None or codes_all_entries(form, layer.matrices[name]):
        return rounded
    return shared_base_coder(layer, name, permutations, feedback=feedback, even=even)


def codes_all_entries(form: KernelForm, matrix: Matrix) -> bool:
    """Whether residuals in this form have a code for every entry."""
    return form.has_codes and not (isinstance(form, Encodable) and form.kept_entries(matrix) is not None)


def refits_for(layer: SourceLayer, bank: BankConfig, matrix: Matrix) -> int:
    """How often a base is refitted to the codes of residuals.

    A base in the model's dtype stays what it is. One for entries that are kept or left out was refitted to these. The
    codes of a calibrated layer are not those of least error, for which the mean would be the best base.
    """
    form = bank.form
    has_codes = isinstance(form, KernelForm) and codes_all_entries(form, matrix)
    return REFITS if bank.base_codes is not None and has_codes and layer.rows is None else 0


def _write_jointly(
    layer: SourceLayer,
    bank: BankConfig,
    form: CodedJointly,
    permutations: Int[np.ndarray, "E f"],
    write: Write,
    measure: Measure,
    of_base: Callable[[str], ExpertCoder],
) -> None:
    """One expert after another, all of its matrices at once."""
    bases: dict[str, np.ndarray] = {}
    for name in filter(bank.has_base_of, layer.shapes):
        base = mean_kernel(aligned_kernels(layer, name, permutations))
        stored = stored_base(layer, bank, name, base, of_base(name))
        write_base(name, stored, write)
        bases[name] = stored.kernel
    stacked: dict[str, np.ndarray] = {}
    experts = zip(aligned_experts(layer, permutations), joint_moments(layer, permutations), strict=True)
    for expert, (aligned, moments) in enumerate(experts):
        kernels = {name: neuron_rows(name, kernel) for name, kernel in aligned.items()} if bases else None
        coder = LeastJointError(moments, kernels)
        residuals = aligned | {name: aligned[name] - base.astype(np.float32) for name, base in bases.items()}
        leaves, approximations = form.encode_expert(residuals, layer.matrices, layer.dtype("up"), coder)
        del residuals
        stack(stacked, leaves, expert, layer.num_experts)
        for name, kernel in aligned.items():
            measure.add(expert, kernel, bases.get(name), approximations[name], moments.get(name))
    for path, array in stacked.items():
        write(f"experts/delta/{path}", array)
