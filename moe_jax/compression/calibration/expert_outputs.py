"""Outputs of the experts of a calibrated layer for tokens of the text, before they are weighted."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.compression.source_layer import SourceLayer
from moe_jax.functional.dense import ffn

Outputs = Callable[[Int[np.ndarray, " n"]], Iterator[tuple[slice, Float[np.ndarray, "c d"]]]]
"""For one expert and tokens given by their indices: yields slices of these, and their float32 outputs."""

# Tokens of a part: one program serves all experts, and the outputs of a long text are never all in memory.
_CHUNK = 1024


def expert_outputs(layer: SourceLayer) -> Iterator[Outputs]:
    """Yields the outputs of one expert after another, of those that the router chooses from.

    Memory holds the kernels of a layer.

    Raises:
      InputError: if a weight is not finite.
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
