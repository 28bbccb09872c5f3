"""The experts of a layer written in the form of a bank: centre, residuals and biases (methods.md 5)."""

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
from moe_jax.compression.calibration.expert_coders import ExpertCoder, expert_coders, joint_moments, shared_base_coder
from moe_jax.compression.coding.centre import REFITS, code_residuals, stack, stored_centre, write_centre
from moe_jax.compression.coding.coder import LeastError, LeastJointError
from moe_jax.compression.coding.pruning import prune
from moe_jax.compression.layer_figures import Measure
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.experts import BankConfig
from moe_jax.experts.forms import KernelForm, Matrix

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
    """Writes the experts of a layer in the form of a bank, around a centre if it has a base.

    Args:
      layer: the experts as they are.
      bank: what they become.
      permutations: the order of every expert's neurons.
      write: takes the leaves.
      refit: the centre is refitted to what a sparse bank leaves out; in codes, to the codes of the residuals.
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
    of_centre = partial(coder_of_centre, layer, bank, permutations=permutations, feedback=feedback, even=even)
    if form.couples_matrices:
        _write_jointly(layer, bank, form, permutations, write, measure, of_centre)
    else:
        for name in layer.shapes:
            coders = partial(expert_coders, layer, name, permutations, feedback=feedback, even=even)
            if coder is not None:
                coders = partial(itertools.repeat, coder, layer.num_experts)
            _write_matrix(layer, bank, form, name, permutations, write, measure, coders, of_centre, refit=refit)
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
    of_centre: Callable[[str], ExpertCoder],
    *,
    refit: bool,
) -> None:
    dtype, matrix = layer.dtype(name), layer.matrices[name]
    kernels = list(aligned_kernels(layer, name, permutations))  # gone through again and again
    layer.forget()
    has_base = bank.has_base_of(name)
    centre = mean_kernel(kernels) if has_base else np.zeros((1, 1), np.float32)
    count, masks = form.kept_entries(matrix), None
    if count is not None:
        start = np.broadcast_to(centre, matrix.shape)
        importances = None if layer.rows is None else [coder.importances for coder in coders()]
        pruned = prune(lambda: kernels, start, count, refit=refit and has_base, importances=importances)
        masks = pruned.masks
        centre = pruned.centre if has_base else centre

    def encode(expert: int, residual: np.ndarray, coder: ExpertCoder) -> tuple[dict[str, np.ndarray], np.ndarray]:
        own = form.of_expert(expert)
        if masks is None:
            leaves, made = own.form.encode(residual, matrix, dtype, coder)
            return {own.folder + leaf: array for leaf, array in leaves.items()}, made
        # Entries that were chosen by their inputs are coded one by one.
        return form.encode(residual, matrix, dtype, CODER, masks[expert])

    chosen = of_centre(name) if has_base else CODER
    coded = code_residuals(
        lambda: kernels,
        centre if has_base else None,
        lambda centre: stored_centre(layer, bank, name, centre, chosen),
        coders,
        encode,
        lambda: Measure(layer.num_experts, layer.moe.expert.dim),
        num_experts=layer.num_experts,
        refits=refits_for(layer, bank, matrix) if refit else 0,
    )
    # Of a leaf that not all experts have, the rest is not filled in.
    coded = coded._replace(leaves={leaf: array[form.experts_with(leaf)] for leaf, array in coded.leaves.items()})
    coded.write(name, write)
    measure.include(coded.measure)


def coder_of_centre(
    layer: SourceLayer,
    bank: BankConfig,
    name: str,
    *,
    permutations: Int[np.ndarray, "E f"] | None = None,
    rounded: LeastError = CODER,
    feedback: bool = True,
    even: bool = False,
) -> ExpertCoder:
    """For the least change of outputs; `rounded` where codes of every entry make up for the errors of a centre's.

    Args:
      layer: of the experts.
      bank: what they become.
      name: of the matrix.
      permutations, feedback, even: see `shared_base_coder`.
      rounded: also for a centre without codes.

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
    return form.has_codes and form.kept_entries(matrix) is None


def refits_for(layer: SourceLayer, bank: BankConfig, matrix: Matrix) -> int:
    """How often a centre is refitted to the codes of residuals.

    A centre in the model's dtype stays what it is. One for entries that are kept or left out was refitted to these. The
    codes of a calibrated layer are not those of least error, for which the mean would be the best centre.
    """
    form = bank.form
    has_codes = isinstance(form, KernelForm) and codes_all_entries(form, matrix)
    return REFITS if bank.base_codes is not None and has_codes and layer.rows is None else 0


def _write_jointly(
    layer: SourceLayer,
    bank: BankConfig,
    form: KernelForm,
    permutations: Int[np.ndarray, "E f"],
    write: Write,
    measure: Measure,
    of_centre: Callable[[str], ExpertCoder],
) -> None:
    """One expert after another, all of its matrices at once."""
    centres: dict[str, np.ndarray] = {}
    for name in filter(bank.has_base_of, layer.shapes):
        centre = mean_kernel(aligned_kernels(layer, name, permutations))
        stored = stored_centre(layer, bank, name, centre, of_centre(name))
        write_centre(name, stored, write)
        centres[name] = stored.kernel
    stacked: dict[str, np.ndarray] = {}
    experts = zip(aligned_experts(layer, permutations), joint_moments(layer, permutations), strict=True)
    for expert, (aligned, moments) in enumerate(experts):
        kernels = {name: neuron_rows(name, kernel) for name, kernel in aligned.items()} if centres else None
        coder = LeastJointError(moments, kernels)
        residuals = aligned | {name: aligned[name] - centre.astype(np.float32) for name, centre in centres.items()}
        leaves, approximations = form.encode_expert(residuals, layer.matrices, layer.dtype("up"), coder)
        del residuals
        stack(stacked, leaves, expert, layer.num_experts)
        for name, kernel in aligned.items():
            measure.add(expert, kernel, centres.get(name), approximations[name], moments.get(name))
    for path, array in stacked.items():
        write(f"experts/delta/{path}", array)
