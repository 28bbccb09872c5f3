"""How errors add up that experts of a layer make together (methods.md 5).

Errors of codes are nearly independent: what each matrix of each expert does to the outputs adds up as squares. Not so
where experts lose what they do not share. The error of a centre is the same in all experts of a token, so that its
outputs are added before they are squared; and what was learnt together, by all matrices of an expert and by the experts
of a token, is also lost together.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.compression.alignment.design_matrix import aligned_biases, aligned_kernels, mean_kernel
from moe_jax.compression.calibration.recorded import LayerRows
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.functional.dense import ffn_hidden

TOKENS = 512
"""For which outputs are computed, at most, evenly from the text."""


class Together(NamedTuple):
    """The error of all experts and matrices together, divided by the sum of what each makes on its own.

    Attributes:
      centre: for an error of the centre, which each matrix makes independently of the others.
      residuals: for all residuals left out: every expert becomes the mean.
    """

    centre: float
    residuals: float


def together(layer: SourceLayer, permutations: Int[np.ndarray, "E f"]) -> Together:
    """Measures both on the calibration text.

    Args:
      layer: a calibrated layer.
      permutations: the order of every expert's neurons around their mean.

    Raises:
      InputError: if a weight is not finite.
    """
    rows = layer.rows
    assert rows is not None
    picked = np.linspace(0, len(rows.experts) - 1, min(TOKENS, len(rows.experts))).astype(int)
    weights = _weights_by_expert(layer, rows, picked)
    of_one = float(np.sum(weights**2, dtype=np.float64))
    centre = float(np.sum(weights.sum(axis=1) ** 2, dtype=np.float64)) / of_one if of_one else 1.0
    return Together(centre, _of_residuals(layer, permutations, np.asarray(rows.inputs[picked], np.float32), weights))


def _weights_by_expert(layer: SourceLayer, rows: LayerRows, picked: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n E"]:
    """Router weights of all experts; 1 of one that every token goes to, and 0 of those that a token does not."""
    experts, weights = rows.experts[picked], np.asarray(rows.weights[picked], np.float32)
    found = np.ones((len(picked), layer.num_experts), np.float32)
    for expert in range(layer.moe.bank_experts):
        found[:, expert] = np.where(experts == expert, weights, 0).sum(axis=1)
    return found


def _of_residuals(
    layer: SourceLayer,
    permutations: Int[np.ndarray, "E f"],
    x: Float[np.ndarray, "n d"],
    weights: Float[np.ndarray, "n E"],
) -> float:
    names = tuple(layer.shapes)
    means = {name: jnp.asarray(mean_kernel(aligned_kernels(layer, name, permutations))) for name in names}
    biases = {name: own for name in names if (own := aligned_biases(layer, name, permutations)) is not None}
    kernels = zip(*(aligned_kernels(layer, name, permutations) for name in names), strict=True)
    all_together, alone = jnp.zeros(x.shape), 0.0
    for expert, own in enumerate(kernels):
        of_expert = {name: jnp.asarray(kernel, jnp.float32) for name, kernel in zip(names, own, strict=True)}
        lost, of_matrices = _lost(
            of_expert,
            means,
            {name: jnp.asarray(stacked[expert], jnp.float32) for name, stacked in biases.items() if name != "down"},
            jnp.asarray(x),
            jnp.asarray(weights[:, expert]),
            activation=layer.moe.expert.activation,
        )
        all_together, alone = all_together + lost, alone + float(of_matrices)
    return float(jnp.sum(all_together**2)) / alone if alone > 0 else 1.0


@partial(jax.jit, static_argnames="activation")
def _lost(
    own: dict[str, Array],
    means: dict[str, Array],
    biases: dict[str, Array],
    x: Float[Array, "n d"],
    weights: Float[Array, " n"],
    *,
    activation: str,
) -> tuple[Float[Array, "n d"], Float[Array, ""]]:
    """Returns how the mean of all matrices changes weighted outputs, and the sum of squares for each mean alone."""

    def change(kernels: dict[str, Array]) -> Float[Array, "n d"]:
        return weights[:, None] * (ffn_hidden(x, kernels, biases, activation) @ kernels["down"]) - outputs

    with jax.default_matmul_precision("highest"):
        outputs = weights[:, None] * (ffn_hidden(x, own, biases, activation) @ own["down"])
        alone = [jnp.sum(change({**own, name: mean}) ** 2) for name, mean in means.items()]
        return change(means), jnp.sum(jnp.stack(alone))
