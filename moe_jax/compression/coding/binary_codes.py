"""Codes of one bit whose scales are refined by what a kernel is given (methods.md 4).

A kernel W [i, o] becomes `r_i s_go b_io`: b is 1 or -1, s the scale of group g of a column, r that of a row (OneBit, Xu
et al., 2024, arXiv 2402.11295, has one s for a column). With H the second moment of its inputs, outputs change by
tr(E^T H E) for the error E. Three steps take turns, each with two of the three as they are:

- s of every column by least squares: `(A^T H A) s = A^T H w`, where A [i, g] has `r_i b_io` in the column of its group;
- r of all columns together: `(H * Z Z^T) r = sum_o Z_io (H W)_io` for `Z_io = s_go b_io`, * by entries;
- b row after row, each making up for the errors of those before it (`calibrated_codes`).

The first two never make the error larger; scales below zero are signs of b. The third one may, and the best stays. So
ARB-LLM (Li et al., 2024, arXiv 2410.03129) refines in turns: by row and column scales (ARB-RC) or with inputs (ARB-X),
of which this is both. BiLLM (arXiv 2402.04291) and MoBiE (arXiv 2604.06798) give salient columns a second code, for
which there is no place in `forms.Quantized`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from moe_jax.compression.coding.calibrated_codes import as_stored, code_each_row, triangular_factor
from moe_jax.compression.coding.quantizer import stored
from moe_jax.experts.forms.coding import Encoded
from moe_jax.functional.codes import SCALE_DTYPE, Grid, repeat_over_rows, scale_leaves, scales_of, unpack

ROUNDS = 8
# Of the error that a round has to gain, for another one.
_LEAST_GAIN = 1e-3
# Of the mean of their diagonal, added to normal equations: float32 does not know such directions.
_RIDGE = 1e-6
_ROWS_AT_ONCE = 128


class Binary(NamedTuple):
    """One kernel: signs, and scales of rows and of groups, not negative."""

    signs: Float[Array, "i o"]
    rows: Float[Array, " i"]
    scales: Float[Array, "g o"]

    def numbers(self, group_size: int) -> Float[Array, "i o"]:
        """Returns the kernel that they stand for."""
        return self.rows[:, None] * repeat_over_rows(self.scales, len(self.rows), group_size) * self.signs


def refined(
    values: Float[np.ndarray, "i o"],
    start: Encoded,
    moment: Float[np.ndarray, "i i"],
    *,
    group_size: int,
    scale_bits: int,
) -> Encoded:
    """Refines codes of one bit with row scales, `start`, of a float32 kernel; never worse, but for 1 % of damping."""
    factor = jnp.asarray(triangular_factor(moment))
    kernel, moment_used = jnp.asarray(values), jnp.matmul(factor, factor.T, precision="highest")
    leaves = {name: jnp.asarray(leaf) for name, leaf in start.leaves.items()}
    codes = unpack(leaves["codes"], len(values), 1, jnp.float32)
    now = Binary(2 * codes - 1, leaves["row_scales"][:, 0].astype(jnp.float32), scales_of(leaves))
    best, least = now, float(_error(kernel, moment_used, now, group_size))
    for _ in range(ROUNDS):
        before = least
        now = _with_row_scales(kernel, moment_used, now, group_size)
        now = with_group_scales(kernel, moment_used, now, group_size, scale_bits)
        for tried in (now, with_signs(kernel, factor, now, group_size)):
            error, now = float(_error(kernel, moment_used, tried, group_size)), tried
            if error < least:
                best, least = tried, error
        if least > before * (1 - _LEAST_GAIN):
            break
    return _encoded(best, group_size, scale_bits)


def _with_row_scales(kernel: Array, moment: Array, now: Binary, group_size: int) -> Binary:
    """The best row scales, as they are stored, where a scale below zero turns the signs of its row."""
    found = np.asarray(row_scales(kernel, moment, now, group_size))
    signs = now.signs * jnp.where(found < 0, -1, 1)[:, None].astype(jnp.float32)
    return now._replace(signs=signs, rows=jnp.asarray(as_stored(np.abs(found))))


@partial(jax.jit, static_argnums=3)
def _error(kernel: Array, moment: Array, now: Binary, group_size: int) -> Float[Array, ""]:
    error = kernel - now.numbers(group_size)
    return jnp.sum(error * jnp.matmul(moment, error, precision="highest"))


@partial(jax.jit, static_argnums=3)
def row_scales(
    kernel: Float[Array, "i o"], moment: Float[Array, "i i"], now: Binary, group_size: int
) -> Float[Array, " i"]:
    """The r of least error for the signs and group scales of `now`; of any sign."""
    made = repeat_over_rows(now.scales, len(kernel), group_size) * now.signs
    left = moment * jnp.matmul(made, made.T, precision="highest")
    right = jnp.sum(made * jnp.matmul(moment, kernel, precision="highest"), axis=1)
    return _solved(left, right[:, None])[:, 0]


@partial(jax.jit, static_argnums=(3, 4))
def with_group_scales(
    kernel: Float[Array, "i o"], moment: Float[Array, "i i"], now: Binary, group_size: int, scale_bits: int
) -> Binary:
    """The s of least error for the signs and row scales of `now`, as they are stored; signs of groups may turn."""
    more = -len(kernel) % group_size
    made = jnp.pad(now.rows[:, None] * now.signs, ((0, more), (0, 0)))
    padded, width = jnp.pad(moment, ((0, more), (0, more))), kernel.shape[1]

    def of_groups(terms: Float[Array, "n o"]) -> Float[Array, "g o"]:
        return jnp.sum(terms.reshape(-1, group_size, width), axis=1)

    def products_with(_: None, start: Array) -> tuple[None, Float[Array, "g o"]]:
        """A column of `A^T H A`, for every column of the kernel."""
        part = lax.dynamic_slice_in_dim(padded, start, group_size, 1)
        own = lax.dynamic_slice_in_dim(made, start, group_size)
        return None, of_groups(made * jnp.matmul(part, own, precision="highest"))

    starts = jnp.arange(0, len(padded), group_size, dtype=jnp.int32)
    _, left = lax.scan(products_with, None, starts)
    targets = jnp.pad(jnp.matmul(moment, kernel, precision="highest"), ((0, more), (0, 0)))
    found = _solved(left.transpose(2, 1, 0), of_groups(made * targets).T[..., None])[..., 0].T
    turned = repeat_over_rows(jnp.where(found < 0, -1, 1).astype(jnp.float32), len(kernel), group_size)
    scales = scales_of(scale_leaves(jnp.abs(found), scale_bits))
    return now._replace(signs=now.signs * turned, scales=scales)


@partial(jax.jit, static_argnums=3)
def with_signs(kernel: Float[Array, "i o"], factor: Float[Array, "i i"], now: Binary, group_size: int) -> Binary:
    """Signs row after row for the scales of `now`, with error feedback; R of the second moment."""
    more = -len(kernel) % _ROWS_AT_ONCE  # rows without weight, which have no part in the errors of others
    every = now.rows[:, None] * repeat_over_rows(now.scales, len(kernel), group_size)
    scales, rows = (jnp.pad(array, ((0, more), (0, 0))) for array in (every, kernel))
    shares = jnp.pad(factor / jnp.diagonal(factor), ((0, more), (0, more)))

    def of_part(errors: Float[Array, "n o"], start: Array) -> tuple[Float[Array, "n o"], Array]:
        shares_of_part = lax.dynamic_slice_in_dim(shares, start, _ROWS_AT_ONCE, axis=1)
        own = lax.dynamic_slice_in_dim(rows, start, _ROWS_AT_ONCE)
        targets = own + jnp.matmul(shares_of_part.T, errors, precision="highest")
        within = lax.dynamic_slice_in_dim(shares_of_part, start, _ROWS_AT_ONCE)
        made, codes = code_each_row(own, targets, within, lambda row: Grid(scales[start + row]), 1)
        return lax.dynamic_update_slice_in_dim(errors, made, start, 0), codes

    starts = jnp.arange(0, len(rows), _ROWS_AT_ONCE, dtype=jnp.int32)
    _, codes = lax.scan(of_part, jnp.zeros_like(rows), starts)
    return now._replace(signs=2 * codes.reshape(rows.shape)[: len(kernel)] - 1)


def _solved(left: Float[Array, "*n g g"], right: Float[Array, "*n g 1"]) -> Float[Array, "*n g 1"]:
    size = jnp.mean(jnp.diagonal(left, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    ridge = _RIDGE * size + jnp.finfo(jnp.float32).tiny
    return jnp.linalg.solve(left + ridge * jnp.eye(left.shape[-1], dtype=left.dtype), right)


def _encoded(one: Binary, group_size: int, scale_bits: int) -> Encoded:
    grid, codes = Grid(one.scales[:, None, :]), (one.signs + 1) / 2
    made = stored(codes[None], grid, len(codes), 1, group_size, scale_bits)
    leaves = {name: np.asarray(leaf) for name, leaf in made.leaves.items()}
    leaves["row_scales"] = np.asarray(one.rows[:, None].astype(SCALE_DTYPE))
    return Encoded(leaves, np.asarray(made.approximation) * np.asarray(one.rows)[:, None])
