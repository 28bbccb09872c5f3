"""Codes chosen one row after another, each making up for the errors of those before it (GPTQ, arXiv 2210.17323).

A kernel W [i, o] is applied to inputs x, whose second moment is H = E[x x^T]. What its codes Q change in the outputs is
tr(E^T H E) for E = W - Q. With H = R R^T and R upper triangular this is a sum over rows,

    sum_q R_qq^2 || t_q - Q_q ||^2,   t_q = W_q + sum_{j < q} (R_jq / R_qq) E_j,

so that row q is best rounded as t_q, and not as W_q, once the rows before it are. This is GPTQ's update, as Chee et al.
write it (QuIP, arXiv 2307.13304, section 3.1): the inverse of H is not needed. Beside it, scales are chosen for the
least squared error of the targets, each row with the weight R_qq^2 that it has in the sum.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jaxtyping import Array, Float

from moe_jax.compression.coding.quantizer import best_grid, fitted_table, nearest_codes, stored
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.coding import Encoded
from moe_jax.functional.products.packing import Grid

DAMPING = 0.01
"""The share of the mean of its diagonal that is added to the diagonal of a second moment: as published."""


def triangular_factor(moment: Float[np.ndarray, "i i"]) -> Float[np.ndarray, "i i"]:
    """Upper triangular R with R R^T = H + `DAMPING` mean(diag H) I, float32; the identity for a moment of zeros.

    Args:
      moment: H, symmetric and positive semi-definite; float32.

    Raises:
      InputError: if it is not.
    """
    level = float(np.mean(np.diagonal(moment), dtype=np.float64))
    if level == 0:
        return np.eye(len(moment), dtype=np.float32)
    # Upwards from the last row, Cholesky's decomposition gives the factor on the other side.
    flipped = moment[::-1, ::-1] / np.float32(level)
    flipped[np.diag_indices_from(flipped)] += np.float32(DAMPING)
    for dtype in (np.float32, np.float64):  # rounding can make a moment indefinite that is nearly singular
        try:
            lower = scipy.linalg.cholesky(flipped.astype(dtype), lower=True, overwrite_a=True, check_finite=False)
        except scipy.linalg.LinAlgError:
            continue
        return np.ascontiguousarray(lower[::-1, ::-1], np.float32) * np.float32(np.sqrt(level))
    raise InputError("a second moment is not positive semi-definite: the calibration is damaged; make it again")


@partial(jax.jit, static_argnames=("bits", "group_size", "fit", "even", "table", "scale_bits", "zero_points"))
def quantize_with_feedback(
    kernel: Float[Array, "i o"],
    factor: Float[Array, "i i"],
    *,
    bits: int,
    group_size: int | None,
    fit: bool = True,
    even: bool = False,
    table: bool = False,
    scale_bits: int = 16,
    zero_points: bool = False,
) -> Encoded:
    """Quantises for the least change of the outputs.

    Args:
      kernel: float32.
      factor: R of the inputs' second moment, as `triangular_factor` gives it.
      bits: of a code.
      group_size: rows that share a scale; None: one scale for all entries, chosen for the kernel as it is.
      fit, even: as of `quantize`.
      table: the kernel has a table of levels of its own, fitted to the kernel as it is.
      scale_bits, zero_points: as of `quantize`.
    """
    rows, width = kernel.shape
    size = min(rows, 128) if group_size is None else group_size
    padding = -rows % size
    # Rows that only fill up the last group have no weight, and no part in the errors of others.
    kernel = jnp.pad(kernel, ((0, padding), (0, 0)))
    diagonal = jnp.diagonal(factor)
    weights = jnp.pad((diagonal / jnp.max(diagonal)) ** 2, (0, padding))[:, None]
    shares = jnp.pad(factor / diagonal, ((0, padding), (0, padding)))
    levels = None
    if table:
        by_group = (1, -1, width) if group_size is None else (-1, size, width)
        levels = fitted_table(
            kernel.reshape(by_group), weights.reshape(*by_group[:2], 1), bits=bits, whole=group_size is None
        )
    choose = partial(
        best_grid, bits=bits, fit=fit, even=even, scale_bits=scale_bits, zero_points=zero_points, table=levels
    )
    common = choose(kernel[None], weights[None], whole=True) if group_size is None else None

    def code_group(errors: Float[Array, "i o"], start: Array) -> tuple[Float[Array, "i o"], tuple[Array, Grid]]:
        shares_of_group = lax.dynamic_slice_in_dim(shares, start, size, axis=1)
        own = lax.dynamic_slice_in_dim(kernel, start, size)
        targets = own + jnp.matmul(shares_of_group.T, errors, precision="highest")
        group_weights = lax.dynamic_slice_in_dim(weights, start, size)
        grid = choose(targets[None], group_weights[None], whole=False) if common is None else common
        of_row = jax.tree.map(lambda scales: scales[0, 0], grid._replace(table=None))._replace(table=levels)
        within = lax.dynamic_slice_in_dim(shares_of_group, start, size)

        def code_row(row_errors: Float[Array, "s o"], row: Array) -> tuple[Float[Array, "s o"], Array]:
            target = targets[row] + jnp.matmul(within[:, row], row_errors, precision="highest")
            codes = nearest_codes(target, of_row, bits)
            error = own[row] - of_row.numbers(codes, bits)
            return row_errors.at[row].set(error), codes

        counted = jnp.arange(size, dtype=jnp.int32)
        row_errors, codes = lax.scan(code_row, jnp.zeros_like(own), counted)
        return lax.dynamic_update_slice_in_dim(errors, row_errors, start, 0), (codes, of_row._replace(table=None))

    starts = jnp.arange(0, rows + padding, size, dtype=jnp.int32)
    _, (codes, grids) = lax.scan(code_group, jnp.zeros_like(kernel), starts)
    grid = jax.tree.map(lambda scales: scales[:, None, :], grids)._replace(table=levels) if common is None else common
    return stored(codes, grid, rows, bits, group_size, scale_bits)
