"""The experts of a layer written in the form of a bank: centre, residuals and biases (METHODS 5)."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.compress.alignment.design_matrix import (
    aligned_biases,
    aligned_experts,
    aligned_kernels,
    mean_kernel,
    neuron_rows,
)
from moe_jax.compress.coding.pruning import prune
from moe_jax.compress.coding.quantizer import quantize
from moe_jax.compress.coding.sparse_encoding import encode_sparse
from moe_jax.compress.coding.truncated_svd import truncated_svd
from moe_jax.compress.figures import Measure
from moe_jax.compress.source_layer import SourceLayer, Write
from moe_jax.experts.config import BankConfig
from moe_jax.experts.deltas import NEURONS


def write_experts(
    layer: SourceLayer, bank: BankConfig, permutations: Int[np.ndarray, "E f"], write: Write, *, refit: bool
) -> Measure:
    """Writes the experts of a layer in the form of a bank, around a centre if it has a base.

    Args:
      layer: the experts as they are.
      bank: as `Form.bank` made it.
      permutations: the order of every expert's neurons.
      write: takes the leaves.
      refit: the centre is refitted to what a sparse bank leaves out.

    Returns:
      The measure, to which the errors of all matrices were added.

    Raises:
      InputError: if a weight is not finite.
    """
    measure = Measure(layer.num_experts, layer.moe.expert.dim)

    if bank.kind == "joint-low-rank":
        _write_joint(layer, bank, permutations, write, measure)
    else:
        for index, name in enumerate(layer.shapes):
            _write_matrix(layer, bank.for_matrix(index), name, permutations, write, measure, refit=refit)
    for name in layer.shapes:
        biases = aligned_biases(layer, name, permutations)
        if biases is not None:
            write(f"experts/{name}/bias", biases)
    return measure


def _write_matrix(
    layer: SourceLayer,
    bank: BankConfig,
    name: str,
    permutations: Int[np.ndarray, "E f"],
    write: Write,
    measure: Measure,
    *,
    refit: bool,
) -> None:
    dtype, shape = layer.dtype(name), layer.shapes[name]
    kernels = list(aligned_kernels(layer, name, permutations))  # gone through again and again
    layer.forget()
    centre = mean_kernel(kernels) if bank.has_base else np.zeros((1, 1), np.float32)
    masks = None
    if bank.kind == "sparse":
        start = np.broadcast_to(centre, shape)
        pruned = prune(lambda: kernels, start, bank.nonzeros(shape), refit=refit and bank.has_base)
        masks = pruned.masks
        centre = pruned.centre if bank.has_base else centre
    stored = centre.astype(dtype)
    if bank.has_base:
        write(f"experts/base/{name}/kernel", stored)

    stacked: dict[str, np.ndarray] = {}
    for expert, kernel in enumerate(kernels):
        residual = kernel - stored.astype(np.float32)
        leaves, approximation = _encode(residual, bank, None if masks is None else masks[expert], dtype)
        _stack(stacked, leaves, expert, layer.num_experts)
        measure.add(expert, kernel, stored if bank.has_base else None, approximation)
    for leaf, array in stacked.items():
        write(f"experts/delta/{name}/{leaf}", array)


def _encode(
    residual: Float[np.ndarray, "i o"], bank: BankConfig, mask: np.ndarray | None, dtype: np.dtype
) -> tuple[dict[str, np.ndarray], np.ndarray | Array]:
    if bank.kind == "sparse":
        assert mask is not None
        return encode_sparse(residual, mask, bank, dtype)
    if bank.kind == "quantized":
        made = quantize(residual, bits=bank.bits, group_size=bank.group_size)
        return {"codes": np.asarray(made.codes), "scales": np.asarray(made.scales)}, made.approximation
    left, right = _factors(residual, bank.rank, dtype)
    product = left.astype(np.float32) @ right.astype(np.float32).T
    return {"a": left, "b": np.ascontiguousarray(right.T)}, product


def _write_joint(
    layer: SourceLayer, bank: BankConfig, permutations: Int[np.ndarray, "E f"], write: Write, measure: Measure
) -> None:
    """One factorisation per expert, of its whole design matrix."""
    dtype = layer.dtype("up")
    centres: dict[str, np.ndarray] = {}
    for name in layer.shapes if bank.has_base else ():
        centres[name] = mean_kernel(aligned_kernels(layer, name, permutations)).astype(layer.dtype(name))
        write(f"experts/base/{name}/kernel", centres[name])
    stacked: dict[str, np.ndarray] = {}
    for expert, aligned in enumerate(aligned_experts(layer, permutations)):
        residuals = [
            neuron_rows(name, kernel - centres[name].astype(np.float32) if bank.has_base else kernel)
            for name, kernel in aligned.items()
        ]
        width = residuals[0].shape[1]
        neurons, columns = _factors(np.concatenate(residuals, axis=1), bank.rank, dtype)
        del residuals
        parts = {name: columns[index * width : (index + 1) * width] for index, name in enumerate(aligned)}
        _stack(stacked, {NEURONS: neurons, **parts}, expert, layer.num_experts)
        for name, kernel in aligned.items():
            product = neurons.astype(np.float32) @ parts[name].astype(np.float32).T
            measure.add(expert, kernel, centres.get(name), np.ascontiguousarray(neuron_rows(name, product)))
    for name, array in stacked.items():
        write(f"experts/delta/{name}/factor", array)


def _factors(matrix: Float[np.ndarray, "n w"], rank: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """`left` [n, r] and `right` [w, r] of the nearest `left right^T`; the singular values go to both alike."""
    u, s, v = truncated_svd(matrix, rank)
    root = np.sqrt(s)
    return (u * root).astype(dtype), (v * root).astype(dtype)


def _stack(stacked: dict[str, np.ndarray], leaves: Mapping[str, np.ndarray], expert: int, experts: int) -> None:
    for name, leaf in leaves.items():
        if name not in stacked:
            stacked[name] = np.empty((experts, *leaf.shape), leaf.dtype)
        stacked[name][expert] = leaf
