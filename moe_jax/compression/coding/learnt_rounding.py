"""Codes of an expert whose rounding is learnt (AutoRound: Cheng et al., 2023, arXiv 2309.05516; methods.md 4).

A code is `clip(round(w / (2 s) + z + v))`: w is an entry, s half the step of its group, times the scale of its row if
there is one, and z the zero point. Learnt are the offset v of every entry, in [-1/2, 1/2], and a factor of the scale of
every group, in [1/2, 3/2]. Both move by signed gradient descent, so many steps at a rate that falls on a line to 0.
Through the rounding goes a gradient as if it were not there. The best of what is looked at every `LOOKED_AT` steps
stays.

What becomes small is the squared error of the outputs of one expert, over its tokens of a calibration text, each with
the weight that it has in second moments (`calibration.expert_statistics`): that of the router, squared.

Other than published: what is learnt together is an expert, not a whole block; a group has one factor and not one for
either end, beginning with a scale of least error and not with that of the largest entry; the rate begins with half of
1 / steps; and the best is judged by tokens that are not learnt from, one in eight of the text. Those of the steps would
flatter it, for there are more offsets than tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from moe_jax.compression.calibration.expert_statistics import WeightedTokens
from moe_jax.compression.coding.quantizer import stored
from moe_jax.experts.forms import Quantized
from moe_jax.experts.forms.coding import Encoded
from moe_jax.functional.codes import SCALE_DTYPE, Grid, repeat_over_rows, scale_leaves, scales_of, zeros_of
from moe_jax.functional.dense import ffn

LOOKED_AT = 50
# Tokens of a step; the most that teach, and that judge, spread over all of an expert's; and which of all judge.
_BATCH, _MOST_TOKENS, _ONE_IN = 512, 2**14, 8


class Start(NamedTuple):
    """One kernel, as learning finds it.

    Attributes:
      values: that is rounded, float32.
      scales: of the groups, or one for all entries, as they are read.
      zeros: their zero points; None: the sign of a scale says which grid a group is on.
      base: the kernel, float32, that the codes are added to; None: there is none.
      rows: scales of the rows; None: there are none.
    """

    values: Float[Array, "i o"]
    scales: Float[Array, "g s"]
    zeros: Float[Array, "g s"] | None = None
    base: Float[Array, "i o"] | None = None
    rows: Float[Array, "i 1"] | None = None


class Rounding(NamedTuple):
    """Offsets of the entries of a kernel, in codes, and factors of the scales of its groups."""

    offsets: Float[Array, "i o"]
    factors: Float[Array, "g s"]


class Expert(NamedTuple):
    """An expert as it is: kernels and biases by name, float32, and the activation."""

    kernels: Mapping[str, Float[Array, "i o"]]
    biases: Mapping[str, Float[Array, " o"]]
    activation: str


def start_of(
    leaves: Mapping[str, np.ndarray],
    values: Float[np.ndarray, "i o"],
    form: Quantized,
    base: Float[np.ndarray, "i o"] | None,
) -> Start:
    """Returns where the learning of a kernel begins, given its leaves in a form without table."""
    own = {name: jnp.asarray(leaf) for name, leaf in leaves.items()}
    zeros = zeros_of(own["zeros"], form.bits) if form.zero_points else None
    rows = own["row_scales"].astype(jnp.float32) if form.row_scales else None
    return Start(jnp.asarray(values), scales_of(own), zeros, None if base is None else jnp.asarray(base), rows)


def fresh(start: Start) -> Rounding:
    """The rounding that changes nothing."""
    return Rounding(jnp.zeros_like(start.values), jnp.ones_like(start.scales))


def grid_and_codes(start: Start, rounding: Rounding, form: Quantized) -> tuple[Grid, Float[Array, "i o"]]:
    """The grid of every group as it will be read, and codes, as floats. Gradients pass all rounding."""
    scales = _passing(start.scales * rounding.factors, lambda s: scales_of(scale_leaves(s, form.scale_bits)))
    top = 2**form.bits - 1
    zeros = start.zeros
    if zeros is None:  # of the odd numbers, or the even ones
        zeros = (top + (scales < 0).astype(jnp.float32)) / 2
    every, middles = (repeat_over_rows(one, len(start.values), form.group_size) for one in (scales, zeros))
    values = start.values if start.rows is None else start.values / start.rows
    steps = jnp.where(every == 0, 0, values / jnp.where(every == 0, 1, 2 * every))
    codes = _passing(jnp.clip(steps + middles + rounding.offsets, 0, top), lambda x: jnp.floor(x + 0.5))
    return Grid(scales, None, start.zeros), codes


def rounded(start: Start, rounding: Rounding, form: Quantized) -> Float[Array, "i o"]:
    """The kernel that codes stand for, with its base."""
    grid, codes = grid_and_codes(start, rounding, form)
    of_rows = jax.tree.map(lambda one: repeat_over_rows(one, len(codes), form.group_size), grid)
    numbers = of_rows.numbers(codes, form.bits) * (1 if start.rows is None else start.rows)
    return numbers if start.base is None else start.base + numbers


def learn_rounding(
    expert: Expert,
    starts: Mapping[str, Start],
    forms: Mapping[str, Quantized],
    tokens: WeightedTokens,
    *,
    steps: int,
) -> dict[str, Encoded]:
    """Learns the rounding of all kernels of an expert; returns their leaves, and the numbers that codes stand for.

    Never worse on the tokens that judge than where learning began. The same input gives the same result.

    Args:
      expert: as it is.
      starts, forms: of its kernels, by name.
      tokens: that count for it.
      steps: at least 1.
    """
    judge = tokens.index % _ONE_IN == _ONE_IN - 1
    if judge.all() or not judge.any():  # of next to nothing, all judge what they have taught
        judging, teaching = _batches(tokens, slice(None)), _batches(tokens, slice(None))
    else:
        judging, teaching = _batches(tokens, judge), _batches(tokens, ~judge)
    own = starts, expert.kernels, expert.biases
    given = _Frozen(forms), expert.activation
    now = {name: fresh(start) for name, start in starts.items()}

    def error(rounding: Mapping[str, Rounding]) -> float:
        return sum(float(_error(rounding, *own, *batch, *given)) for batch in judging)

    best, least = now, error(now)
    for step in range(steps):
        rate = jnp.float32((1 - step / steps) / (2 * steps))
        now = _moved(now, *own, *teaching[step % len(teaching)], rate, *given)
        if (step + 1) % LOOKED_AT == 0 or step + 1 == steps:
            found = error(now)
            if found < least:
                best, least = now, found
    return {name: _encoded(starts[name], best[name], forms[name]) for name in starts}


def _batches(tokens: WeightedTokens, chosen: Any) -> list[tuple[Float[Array, "b d"], Float[Array, " b"]]]:
    """Inputs and weights of some tokens, in a drawn order; the last ones are filled up with some that do not count."""
    inputs, weights = tokens.inputs[chosen], tokens.weights[chosen]
    some = np.linspace(0, len(inputs) - 1, min(_MOST_TOKENS, len(inputs))).round().astype(np.int64)
    some = np.random.default_rng(0).permutation(some)
    filled = np.pad(some, (0, -len(some) % _BATCH), mode="wrap")
    counted = np.where(np.arange(len(filled)) < len(some), weights[filled], 0).astype(np.float32)
    parts = [slice(at, at + _BATCH) for at in range(0, len(filled), _BATCH)]
    return [(jnp.asarray(inputs[filled[part]]), jnp.asarray(counted[part])) for part in parts]


class _Frozen(tuple):
    """Forms by name, as an argument that a compiled program depends on."""

    def __new__(cls, forms: Mapping[str, Quantized]) -> "_Frozen":
        return super().__new__(cls, forms.items())


def squared_error(
    rounding: Mapping[str, Rounding],
    starts: Mapping[str, Start],
    kernels: Mapping[str, Array],
    biases: Mapping[str, Array],
    x: Float[Array, "n d"],
    weights: Float[Array, " n"],
    forms: tuple[tuple[str, Quantized], ...],
    activation: str,
) -> Float[Array, ""]:
    """The sum over tokens of the squared errors of an expert's outputs, times their weights."""
    with jax.default_matmul_precision("highest"):
        coded = {name: rounded(starts[name], rounding[name], form) for name, form in forms}
        errors = ffn(x, coded, biases, activation) - ffn(x, kernels, biases, activation)
        return jnp.sum(weights * jnp.sum(jnp.square(errors), axis=-1))


_error = jax.jit(squared_error, static_argnums=(6, 7))


@partial(jax.jit, static_argnums=(7, 8))
def _moved(
    rounding: Mapping[str, Rounding],
    starts: Mapping[str, Start],
    kernels: Mapping[str, Array],
    biases: Mapping[str, Array],
    x: Float[Array, "n d"],
    weights: Float[Array, " n"],
    rate: Float[Array, ""],
    forms: tuple[tuple[str, Quantized], ...],
    activation: str,
) -> dict[str, Rounding]:
    """One step against the signs of the gradients, within the bounds."""
    slopes = jax.grad(squared_error)(rounding, starts, kernels, biases, x, weights, forms, activation)
    moved = jax.tree.map(lambda value, slope: value - rate * jnp.sign(slope), dict(rounding), slopes)
    return {
        name: Rounding(jnp.clip(one.offsets, -0.5, 0.5), jnp.clip(one.factors, 0.5, 1.5)) for name, one in moved.items()
    }


@partial(jax.jit, static_argnums=2)
def _encoded(start: Start, rounding: Rounding, form: Quantized) -> Encoded:
    grid, codes = grid_and_codes(start, rounding, form)
    by_group = jax.tree.map(lambda one: one[:, None, :], grid)
    made = stored(codes[None], by_group, len(codes), form.bits, form.group_size, form.scale_bits)
    if start.rows is None:
        return made
    return Encoded({**made.leaves, "row_scales": start.rows.astype(SCALE_DTYPE)}, made.approximation * start.rows)


def _passing(x: Float[Array, "*s"], function: Callable[[Array], Array]) -> Float[Array, "*s"]:
    """Returns the function of x; its gradient is that of x."""
    return lax.stop_gradient(function(x)) + (x - lax.stop_gradient(x))  # in this order, it is exact
