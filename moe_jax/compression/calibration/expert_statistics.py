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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.compression.calibration.recorded import LayerRows
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.functional.ffn import ffn, ffn_hidden
from moe_jax.nn.moe import RouterStatistics


def statistics_of(layer: SourceLayer) -> RouterStatistics:
    """Returns statistics of the router for the experts in the bank: measured on a text, or derived from its weights.

    Without a text all experts count as used alike, and are as similar as the columns of the router's (last) matrix.

    Raises:
      InputError: if the router has weights that are not finite, or too large.
    """
    known = None if layer.calibration is None else layer.calibration.statistics
    if known is None:
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


BACKGROUND = 64
"""Weight of the tokens of the whole layer, in tokens that are routed to an expert."""
_BACKGROUND_ROWS = 512

# Tokens of a part: one program serves all experts, and what a long text gives is never all in memory.
_CHUNK = 1024


class _Rows(NamedTuple):
    """Tokens that count for an expert.

    Attributes:
      index: of each among the tokens of the layer.
      weights: float32: squares of router weights, times the dependence of the loss on the token.
    """

    index: np.ndarray
    weights: np.ndarray


def moments(layer: SourceLayer, name: str) -> Iterator[Float[np.ndarray, "i i"]]:
    """Yields the second moment of the inputs of a matrix, for one expert after another; float32, a sum over tokens.

    Args:
      layer: a calibrated layer. Its experts' neurons are in the order in which they are stored.
      name: of the matrix.
    """
    rows = layer.rows
    assert rows is not None
    in_bank = layer.moe.bank_experts
    counted = (_rows_of(rows, expert if expert < in_bank else None) for expert in range(layer.num_experts))
    if name != "down":
        for own in counted:
            yield _sum(rows, own, lambda x: x, rows.inputs.shape[1])
        return
    names = [name for name in layer.shapes if name != "down"]
    biases = {name: stacked for name in names if (stacked := layer.biases(name)) is not None}
    kernels = zip(*map(layer.kernels, names), strict=True)
    for expert, (own, of_expert) in enumerate(zip(counted, kernels, strict=True)):
        apply = partial(
            _hidden,
            dict(zip(names, of_expert, strict=True)),
            {name: stacked[expert] for name, stacked in biases.items()},
            activation=layer.moe.expert.activation,
        )
        yield _sum(rows, own, apply, layer.moe.expert.dim)


def tokens_per_expert(layer: SourceLayer) -> np.ndarray:
    """Returns how many tokens of the text are routed to every expert of the bank."""
    assert layer.rows is not None
    experts = layer.rows.experts
    return np.bincount(experts[experts >= 0], minlength=layer.num_experts)


def _rows_of(rows: LayerRows, expert: int | None) -> _Rows:
    """Returns the tokens of an expert of the bank; None: of an expert that all tokens go to."""
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
    return _Rows(index, weights if rows.gradients is None else weights * rows.gradients[index])


def _sum(rows: LayerRows, own: _Rows, apply: Callable[[Array], Array], size: int) -> Float[np.ndarray, "i i"]:
    """Returns the sum of w a a^T over rows, where a is the result of `apply` for an input."""
    total = jnp.zeros((size, size), jnp.float32)
    for start in range(0, len(own.index), _CHUNK):
        part = slice(start, start + _CHUNK)
        x = np.asarray(rows.inputs[own.index[part]], np.float32)
        weights = own.weights[part]
        missing = _CHUNK - len(weights)  # rows of no weight, so that one program serves all experts
        x, weights = np.pad(x, ((0, missing), (0, 0))), np.pad(weights, (0, missing))
        total = _add(total, apply(jnp.asarray(x)), jnp.asarray(weights))
    return np.asarray(total)


@partial(jax.jit, donate_argnums=0)
def _add(total: Float[Array, "i i"], a: Float[Array, "n i"], weights: Float[Array, " n"]) -> Float[Array, "i i"]:
    scaled = a * jnp.sqrt(weights)[:, None]
    return total + jnp.matmul(scaled.T, scaled, precision="highest")


@partial(jax.jit, static_argnames="activation")
def _hidden(
    kernels: Mapping[str, Float[Array, "d f"]],
    biases: Mapping[str, Float[Array, " f"]],
    x: Float[Array, "n d"],
    *,
    activation: str,
) -> Float[Array, "n f"]:
    with jax.default_matmul_precision("highest"):
        return ffn_hidden(x, kernels, biases, activation)


Outputs = Callable[[Int[np.ndarray, " n"]], Iterator[tuple[slice, Float[np.ndarray, "c d"]]]]
"""For one expert and tokens given by their indices: yields slices of these, and their float32 outputs."""


def expert_outputs(layer: SourceLayer) -> Iterator[Outputs]:
    """Yields the outputs of one expert after another, of those that the router chooses from.

    Memory holds the kernels of a layer.
    """
    rows = layer.rows
    assert rows is not None
    biases = {name: stacked for name in layer.shapes if (stacked := layer.biases(name)) is not None}
    kernels = zip(*(layer.kernels(name) for name in layer.shapes), strict=True)
    for expert, own in enumerate(itertools.islice(kernels, layer.moe.routed_experts)):
        apply = partial(
            _apply,
            {name: jnp.asarray(kernel, jnp.float32) for name, kernel in zip(layer.shapes, own, strict=True)},
            {name: jnp.asarray(stacked[expert], jnp.float32) for name, stacked in biases.items()},
            activation=layer.moe.expert.activation,
        )
        yield partial(_in_parts, rows.inputs, apply)


def _in_parts(
    inputs: Float[np.ndarray, "T d"], apply: Callable[[Array], Array], tokens: Int[np.ndarray, " n"]
) -> Iterator[tuple[slice, Float[np.ndarray, "c d"]]]:
    for start in range(0, len(tokens), _CHUNK):
        part = slice(start, min(start + _CHUNK, len(tokens)))
        x = np.asarray(inputs[tokens[part]], np.float32)
        padded = np.pad(x, ((0, _CHUNK - len(x)), (0, 0)))
        yield part, np.asarray(apply(jnp.asarray(padded)))[: len(x)]


@partial(jax.jit, static_argnames="activation")
def _apply(
    kernels: Mapping[str, Array], biases: Mapping[str, Array], x: Float[Array, "n d"], *, activation: str
) -> Float[Array, "n d"]:
    with jax.default_matmul_precision("highest"):
        return ffn(x, kernels, biases, activation)
