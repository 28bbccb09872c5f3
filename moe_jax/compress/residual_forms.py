"""Forms of a residual: what a bank stores of it, and how that is made (METHODS 5).

Without a centre the experts themselves are stored in these forms: those are baselines.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.compress.base import mean_kernel
from moe_jax.compress.deltas import Write
from moe_jax.compress.design import aligned_biases, aligned_experts, aligned_kernels, neuron_rows
from moe_jax.compress.figures import Measure
from moe_jax.compress.quantize import DEFAULT_GROUP_SIZE, quantize
from moe_jax.compress.residuals import common_counts, kept_entries, prune
from moe_jax.compress.source_layer import SourceLayer
from moe_jax.compress.sparse_encoding import encode_sparse
from moe_jax.compress.storage import fewest_bytes_places, joint_rank, separate_rank
from moe_jax.compress.truncated_svd import truncated_svd
from moe_jax.errors import InputError, check_member
from moe_jax.experts.config import BITS, VALUE_BITS, BankConfig, FFNConfig
from moe_jax.experts.deltas import NEURONS

RESIDUALS = ("up", "svd", "quantized")
DESIGNS = ("concat", "separate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One form.

    Attributes:
      residual: `up`: the largest entries; `svd`: low-rank factors; `quantized`: all entries in a few bits.
      keep: share of the entries that stay, of low-rank factors the numbers that are stored; None for `quantized`.
      bits: of all entries, or of those that stay; None: these are floats.
      design: `concat`: one threshold, or one factorisation, for the whole design matrix of an expert; `separate`: one
        for each matrix.
      refit: the centre is refitted to what is pruned.
    """

    residual: Literal["up", "svd", "quantized"]
    keep: float | None = None
    bits: int | None = None
    design: Literal["concat", "separate"] = "concat"
    refit: bool = True

    def __post_init__(self) -> None:
        check_member("residual", self.residual, RESIDUALS)
        check_member("design", self.design, DESIGNS)
        if self.residual == "quantized":
            if self.keep is not None:
                raise InputError(
                    "keep does not go with a quantized residual, of which every entry stays: give bits"
                )
            if self.bits not in BITS:
                raise InputError(f"bits={self.bits} must be one of {', '.join(map(str, BITS))}")
            return
        check_keep(self.keep)
        if self.bits is not None and self.residual == "svd":
            raise InputError("bits do not go with an svd residual: its factors are floats")
        if self.bits is not None and self.bits not in VALUE_BITS:
            raise InputError(f"bits={self.bits} of kept entries must be one of {', '.join(map(str, VALUE_BITS))}")

    @property
    def needs_shares(self) -> bool:
        """Whether the bank depends on where the largest entries are."""
        return self.residual == "up" and self.design == "concat"

    def bank(
        self, expert: FFNConfig, d_model: int, *, base: Literal["shared", "none"], shares: Sequence[float] | None
    ) -> BankConfig:
        """The bank of a layer.

        Args:
          expert: its FFN.
          d_model: d.
          base: whether there is a centre.
          shares: of each matrix in the entries that stay, if `needs_shares`.
        """
        shapes = expert.shapes(d_model)
        if self.residual == "quantized":
            return BankConfig(kind="quantized", base=base, bits=self.bits, group_size=DEFAULT_GROUP_SIZE)
        assert self.keep is not None
        if self.residual == "svd" and self.design == "concat":
            rank = min(joint_rank(self.keep, expert, d_model), expert.dim, len(shapes) * d_model)
            return BankConfig(kind="joint-low-rank", base=base, rank=rank)
        if self.residual == "svd":
            return BankConfig(kind="low-rank", base=base, rank=separate_rank(self.keep, expert, d_model))
        sizes = [math.prod(shape) for shape in shapes.values()]
        if self.needs_shares:
            assert shares is not None
            counts = common_counts(shares, sizes, self.keep)
        else:
            counts = tuple(kept_entries(size, self.keep) for size in sizes)
        return BankConfig(
            kind="sparse",
            base=base,
            rate=1 - self.keep,
            entries=counts,
            places=fewest_bytes_places(shapes.values(), counts),
            bits=self.bits,
            group_size=None if self.bits is None else DEFAULT_GROUP_SIZE,
        )


def describe(bank: BankConfig) -> str:
    """The form that a bank has, in words."""
    if bank.kind == "quantized":
        return f"quantized, {bank.bits} bits"
    if bank.kind == "sparse":
        assert bank.rate is not None
        values = "" if bank.bits is None else f", {bank.bits}-bit values"
        return f"up, keep {1 - bank.rate:.4g}{values}, {bank.places}"
    return f"svd, rank {bank.rank}"


def check_keep(keep: float | None) -> None:
    """Raises `InputError` unless `keep` is a share."""
    if keep is None:
        raise InputError("keep is missing: the share of the experts that stays, in (0, 1]")
    if not 0.0 < keep <= 1.0:
        raise InputError(f"keep={keep:g} must lie in (0, 1]: it is the share of the experts that stays")


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
      What the errors are measured by.

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
        made = quantize(residual, bits=bank.bits, group_size=bank.group_size, clip=True)
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
