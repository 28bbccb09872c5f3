"""The experts of a layer written in the form of a bank: centre, residuals and biases (methods.md 5)."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
from jaxtyping import Int

from moe_jax.compress.alignment.design_matrix import (
    aligned_biases,
    aligned_experts,
    aligned_kernels,
    mean_kernel,
)
from moe_jax.compress.calibration.expert_coders import ExpertCoder, expert_coders
from moe_jax.compress.coding.coder import LeastError
from moe_jax.compress.coding.pruning import prune
from moe_jax.compress.layer_figures import Measure
from moe_jax.compress.source_layer import SourceLayer, Write
from moe_jax.errors import InputError
from moe_jax.experts import BankConfig
from moe_jax.experts.forms import KernelForm

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
) -> Measure:
    """Writes the experts of a layer in the form of a bank, around a centre if it has a base.

    Args:
      layer: the experts as they are.
      bank: as `Form.bank` made it.
      permutations: the order of every expert's neurons.
      write: takes the leaves.
      refit: the centre is refitted to what a sparse bank leaves out.
      feedback: see `LeastOutputError`; of a layer that was calibrated.
      even: see `LeastError`.

    Returns:
      The measure, to which the errors of all matrices were added.

    Raises:
      InputError: if a weight is not finite.
    """
    measure = Measure(layer.num_experts, layer.moe.expert.dim)

    form = bank.form
    assert isinstance(form, KernelForm)
    if form.couples_matrices:
        if layer.rows is not None:
            raise InputError(
                f"layer {layer.index}: matrices that are factored together have no inputs in common, so that a "
                "calibration cannot be used; choose --design separate, or leave --calibrate out"
            )
        _write_jointly(layer, form, bank.has_base, permutations, write, measure)
    else:
        for name in layer.shapes:
            coders = partial(expert_coders, layer, name, permutations, feedback=feedback, even=even)
            _write_matrix(layer, form, bank.has_base, name, permutations, write, measure, coders, refit=refit)
    for name in layer.shapes:
        biases = aligned_biases(layer, name, permutations)
        if biases is not None:
            write(f"experts/{name}/bias", biases)
    return measure


def _write_matrix(
    layer: SourceLayer,
    form: KernelForm,
    has_base: bool,
    name: str,
    permutations: Int[np.ndarray, "E f"],
    write: Write,
    measure: Measure,
    coders: Callable[[], Iterable[ExpertCoder]],
    *,
    refit: bool,
) -> None:
    dtype, matrix = layer.dtype(name), layer.matrices[name]
    kernels = list(aligned_kernels(layer, name, permutations))  # gone through again and again
    layer.forget()
    centre = mean_kernel(kernels) if has_base else np.zeros((1, 1), np.float32)
    count, masks = form.kept_entries(matrix), None
    if count is not None:
        start = np.broadcast_to(centre, matrix.shape)
        importances = None if layer.rows is None else [coder.importances for coder in coders()]
        pruned = prune(lambda: kernels, start, count, refit=refit and has_base, importances=importances)
        masks = pruned.masks
        centre = pruned.centre if has_base else centre
    stored = layer.stored(name, centre)
    if has_base:
        write(f"experts/base/{name}/kernel", stored)

    stacked: dict[str, np.ndarray] = {}
    for expert, (kernel, coder) in enumerate(zip(kernels, coders(), strict=True)):
        residual = kernel - stored.astype(np.float32)
        if masks is None:
            leaves, approximation = form.encode(residual, matrix, dtype, coder)
        else:  # entries that were chosen by their inputs are coded one by one
            leaves, approximation = form.encode(residual, matrix, dtype, CODER, masks[expert])
        _stack(stacked, leaves, expert, layer.num_experts)
        measure.add(expert, kernel, stored if has_base else None, approximation, coder.moment)
    for leaf, array in stacked.items():
        write(f"experts/delta/{name}/{leaf}", array)


def _write_jointly(
    layer: SourceLayer,
    form: KernelForm,
    has_base: bool,
    permutations: Int[np.ndarray, "E f"],
    write: Write,
    measure: Measure,
) -> None:
    """One expert after another, all of its matrices at once."""
    centres: dict[str, np.ndarray] = {}
    for name in layer.shapes if has_base else ():
        centres[name] = layer.stored(name, mean_kernel(aligned_kernels(layer, name, permutations)))
        write(f"experts/base/{name}/kernel", centres[name])
    stacked: dict[str, np.ndarray] = {}
    for expert, aligned in enumerate(aligned_experts(layer, permutations)):
        residuals = aligned
        if has_base:
            residuals = {name: kernel - centres[name].astype(np.float32) for name, kernel in aligned.items()}
        leaves, approximations = form.encode_expert(residuals, layer.matrices, layer.dtype("up"), CODER)
        del residuals
        _stack(stacked, leaves, expert, layer.num_experts)
        for name, kernel in aligned.items():
            measure.add(expert, kernel, centres.get(name), approximations[name])
    for path, array in stacked.items():
        write(f"experts/delta/{path}", array)


def _stack(stacked: dict[str, np.ndarray], leaves: Mapping[str, np.ndarray], expert: int, experts: int) -> None:
    for name, leaf in leaves.items():
        if name not in stacked:
            stacked[name] = np.empty((experts, *leaf.shape), leaf.dtype)
        stacked[name][expert] = leaf
