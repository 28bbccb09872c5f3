"""Usage, inputs and outputs of the experts of a layer on the calibration text.

*Second moments* of the inputs of every expert's matrices: a routed expert adds `w (h W_down)` to the output of a token,
so that the effect of an error of its matrices there grows with the square of the router weight w. So the moments of an
expert are sums of `w^2 x x^T` over the tokens that are routed to it, where x is its input for `gate` and `up`, and its
hidden activations for `down`. A universal FFN beside the bank that counts as an expert gets all tokens, with equal
weights. If it is known how much the loss depends on every token (`sensitivities`), tokens are weighted by that, too.

An expert to which few tokens are routed would have a moment of low rank, by which most of its weights would not matter.
So some tokens of the whole layer count for every expert, together as much as `BACKGROUND` tokens that are routed to it:
a moment is shrunk towards that of the layer, the more the rarer the expert is used.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.compression.calibration.recording import LayerRows
from moe_jax.compression.coding.half_products import add_squares, mirrored
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.functional.dense import ffn, ffn_hidden
from moe_jax.models.own_parts import LINEAR
from moe_jax.nn.moe import RouterStatistics


def statistics_of(layer: SourceLayer) -> RouterStatistics:
    """Returns statistics of the router for the experts in the bank: measured on a text, or derived from its weights.

    Without a text all experts count as used alike, and are as similar as the columns of the router's (last) matrix.
    Raises `InputError` without one if the router is not linear.
    """
    known = None if layer.calibration is None else layer.calibration.statistics
    if known is None:
        if layer.moe.router != LINEAR:
            raise InputError(
                f"layer {layer.index}: nothing is known of what its router, {layer.moe.router!r}, decides; give a text "
                "to calibrate on"
            )
        matrix = layer.leaf("router/out/kernel" if layer.moe.universal == "coder" else "router/kernel")
        columns = matrix.astype(np.float64)
        norms = np.linalg.norm(columns, axis=0)
        products = np.outer(norms, norms)
        similarity = np.divide(columns.T @ columns, products, out=np.zeros_like(products), where=products > 0)
        uniform = np.full(len(norms), 1 / len(norms))
        known = RouterStatistics(uniform, uniform, similarity)
    if layer.moe.merged_experts is None:
        return known
    # For merged experts: what goes to one of them is added up.
    member = np.eye(layer.moe.merged_experts)[layer.leaf("groups")]
    share = member / member.sum(axis=0)
    return RouterStatistics(known.usage @ member, known.score @ member, share.T @ known.similarity @ share)


def routed_tokens(layer: SourceLayer) -> tuple[int, ...] | None:
    """Returns how many tokens of the text are routed to each expert of the bank; None without rows of the text."""
    if layer.rows is None:
        return None
    experts = np.asarray(layer.rows.experts)
    return tuple(np.bincount(experts[experts >= 0], minlength=layer.moe.bank_experts).tolist())


def routed_by_source(layer: SourceLayer, sources: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
    """Returns the same for each of several sources; `sources` are their numbers of tokens, in the order of the rows.

    Returns None for a single source, or where rows or sources are not known.
    """
    if layer.rows is None or len(sources) < 2:
        return None
    found, begin = {}, 0
    for name, count in sources.items():
        experts = np.asarray(layer.rows.experts[begin : begin + count])
        found[name] = tuple(np.bincount(experts[experts >= 0], minlength=layer.moe.bank_experts).tolist())
        begin += count
    return found


BACKGROUND = 64
"""Weight of the tokens of the whole layer, in tokens that are routed to an expert."""
_BACKGROUND_ROWS = 512

# Of the moments that a layer keeps of its inputs, and as much of its hidden activations.
_MOST_BYTES_KEPT = 2**28

# Tokens of a part: one program serves all experts, and what a long text gives is never all in memory.
_CHUNK = 1024

Outputs = Callable[[Int[np.ndarray, " n"]], Iterator[tuple[slice, Float[np.ndarray, "c d"]]]]
"""For one expert and tokens given by their indices: yields slices of these, and their float32 outputs."""


def moments(layer: SourceLayer, name: str) -> Iterator[Float[np.ndarray, "i i"]]:
    """Yields the second moment of the inputs of a matrix, for one expert after another; float32, a sum over tokens.

    Of a layer of which only squares are known, their means are on the diagonal, and all else is zero.

    They are read-only: those that take little memory are kept with the layer, for every matrix and every centre asks
    for them anew.
    """
    assert layer.calibration is not None
    rows, known = layer.rows, layer.calibration.squares
    if known is not None:
        yield from map(np.diag, known["hidden" if name == "down" else "inputs"])
        return
    assert rows is not None
    of_what, size = ("hidden", layer.moe.expert.dim) if name == "down" else ("inputs", rows.inputs.shape[1])
    if of_what in layer.moments:
        yield from layer.moments[of_what]
        return
    every = _sums(layer, rows, of_what, (size, size))
    if layer.num_experts * size**2 * np.dtype(np.float32).itemsize > _MOST_BYTES_KEPT:
        yield from every
        return
    layer.moments[of_what] = list(every)
    yield from layer.moments[of_what]


def squares(layer: SourceLayer, name: str) -> Iterator[Float[np.ndarray, " i"]]:
    """Yields the diagonals of `moments`, for which the rest of them is not computed."""
    rows = layer.rows
    assert rows is not None
    of_what, size = ("hidden", layer.moe.expert.dim) if name == "down" else ("inputs", rows.inputs.shape[1])
    yield from _sums(layer, rows, of_what, (size,))


def total_weights(layer: SourceLayer) -> Iterator[float]:
    """Yields the sum of the weights that tokens have in `moments` and `squares`, for one expert after another."""
    assert layer.rows is not None
    for expert in range(layer.num_experts):
        _, weights = _counted(layer.rows, expert if expert < layer.moe.bank_experts else None)
        yield float(weights.sum(dtype=np.float64))


def _sums(layer: SourceLayer, rows: LayerRows, of_what: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yields the weighted sums over tokens of `x x^T`, or for a shape [i] of the squares of x."""
    add, finish = (_add, mirrored) if len(shape) == 2 else (_add_squares, lambda total: total)
    given: Iterator[Callable[[Array], Array]] = itertools.repeat(lambda x: x, layer.num_experts)
    if of_what == "hidden":
        given = _functions(layer, ffn_hidden, [name for name in layer.shapes if name != "down"])
    for expert, function in enumerate(given):
        index, weights = _counted(rows, expert if expert < layer.moe.bank_experts else None)
        total = jnp.zeros(shape, jnp.float32)
        for part, x in _parts(rows, index):
            some = np.pad(weights[part], (0, _CHUNK - (part.stop - part.start)))
            total = add(total, function(x), jnp.asarray(some))
        found = np.asarray(finish(total))
        del total  # moments are large: none stays while the next one is made
        yield found
        del found


def expert_outputs(layer: SourceLayer) -> Iterator[Outputs]:
    """Yields the outputs of one expert after another, of those that the router chooses from, before they are weighted.

    Memory holds the kernels of a layer.
    """
    rows = layer.rows
    assert rows is not None

    def outputs(
        function: Callable[[Array], Array], tokens: Int[np.ndarray, " n"]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        for part, x in _parts(rows, tokens):
            yield part, np.asarray(function(x))[: part.stop - part.start]

    for function in itertools.islice(_functions(layer, ffn, list(layer.shapes)), layer.moe.routed_experts):
        yield partial(outputs, function)


def tokens_per_expert(layer: SourceLayer) -> np.ndarray:
    """Returns how many tokens of the text are routed to every expert of the bank."""
    assert layer.rows is not None
    experts = layer.rows.experts
    return np.bincount(experts[experts >= 0], minlength=layer.num_experts)


class WeightedTokens(NamedTuple):
    """The tokens that count for an expert in `moments`: their indices, inputs in float32, and weights there."""

    index: Int[np.ndarray, " n"]
    inputs: Float[np.ndarray, "n d"]
    weights: Float[np.ndarray, " n"]


def weighted_tokens(layer: SourceLayer, expert: int) -> WeightedTokens:
    """Returns the tokens that count for an expert; of a layer with rows."""
    rows = layer.rows
    assert rows is not None
    index, weights = _counted(rows, expert if expert < layer.moe.bank_experts else None)
    return WeightedTokens(index, np.asarray(rows.inputs[index], np.float32), weights)


def _functions(
    layer: SourceLayer, function: Callable[..., Array], names: Sequence[str]
) -> Iterator[Callable[[Array], Array]]:
    """Yields a function of inputs with the matrices of one expert after another."""
    biases = {name: stacked for name in names if (stacked := layer.biases(name)) is not None}
    for expert, kernels in enumerate(zip(*map(layer.kernels, names), strict=True)):
        own = {name: stacked[expert] for name, stacked in biases.items()}
        activation = layer.moe.expert.activation
        yield partial(_applied, dict(zip(names, kernels, strict=True)), own, function=function, activation=activation)


@partial(jax.jit, static_argnames=("function", "activation"))
def _applied(
    kernels: Mapping[str, Array],
    biases: Mapping[str, Array],
    x: Float[Array, "n d"],
    *,
    function: Callable[..., Array],
    activation: str,
) -> Float[Array, "n _"]:
    with jax.default_matmul_precision("highest"):
        return function(x, kernels, biases, activation)


def _counted(rows: LayerRows, expert: int | None) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The tokens that count for an expert of the bank, and their weights; None: for one that all tokens go to.

    Weights are squares of router weights, times the dependence of the loss on the token.
    """
    if expert is None:
        index, weights = np.arange(len(rows.experts)), np.ones(len(rows.experts), np.float32)
    else:
        chosen = rows.experts == expert
        index = np.flatnonzero(chosen.any(axis=1))
        # A token may have chosen the same merged expert twice: it is applied with both weights.
        weights = np.where(chosen[index], rows.weights[index], 0).sum(axis=1, dtype=np.float32) ** 2
    background = np.linspace(0, len(rows.experts) - 1, min(_BACKGROUND_ROWS, len(rows.experts))).astype(int)
    usual = float(np.mean(weights)) if len(weights) else 1.0
    level = max(usual, np.finfo(np.float32).tiny) * BACKGROUND / len(background)
    index = np.concatenate([index, background])
    weights = np.concatenate([weights, np.full(len(background), level, np.float32)])
    return index, weights if rows.gradients is None else weights * rows.gradients[index]


def _parts(rows: LayerRows, tokens: Int[np.ndarray, " n"]) -> Iterator[tuple[slice, Float[Array, "c d"]]]:
    """Yields slices of the tokens with their inputs, and rows of zeros after the last ones."""
    for start in range(0, len(tokens), _CHUNK):
        part = slice(start, min(start + _CHUNK, len(tokens)))
        x = np.asarray(rows.inputs[tokens[part]], np.float32)
        yield part, jnp.asarray(np.pad(x, ((0, _CHUNK - len(x)), (0, 0))))


@partial(jax.jit, donate_argnums=0)
def _add(total: Float[Array, "i i"], a: Float[Array, "n i"], weights: Float[Array, " n"]) -> Float[Array, "i i"]:
    """Adds to a moment, whose other half then is its mirror image."""
    return add_squares(total, a * jnp.sqrt(weights)[:, None])


@partial(jax.jit, donate_argnums=0)
def _add_squares(total: Float[Array, " i"], a: Float[Array, "n i"], weights: Float[Array, " n"]) -> Float[Array, " i"]:
    return total + jnp.sum(jnp.square(a) * weights[:, None], axis=0)
