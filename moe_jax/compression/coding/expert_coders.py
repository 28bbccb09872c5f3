"""Coders of the experts' kernels and of their shared base.

For a calibrated layer they minimise the change of outputs, else the error of the kernels themselves.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.calibration.moments import moments
from moe_jax.compression.coding.coder import LeastError, LeastOutputError
from moe_jax.compression.source_layer import SourceLayer

ExpertCoder = LeastError | LeastOutputError


def expert_coders(
    layer: SourceLayer,
    name: str,
    permutations: Int[np.ndarray, "E f"] | None = None,
    *,
    fit: bool = True,
    feedback: bool = True,
    even: bool = False,
) -> Iterator[ExpertCoder]:
    """Yields the coder of one expert after another.

    Args:
      layer: its experts.
      name: of the matrix.
      permutations: the order of every expert's neurons; None: as they are stored.
      fit, even: see `LeastError`.
      feedback: see `LeastOutputError`.

    Raises:
      InputError: if a weight is not finite.
    """
    if layer.rows is None:
        yield from (LeastError(fit=fit, even=even) for _ in range(layer.num_experts))
        return
    for moment in _moments(layer, name, permutations):
        yield LeastOutputError(moment, fit=fit, feedback=feedback, even=even)


def shared_base_coder(
    layer: SourceLayer,
    name: str,
    permutations: Int[np.ndarray, "E f"] | None = None,
    *,
    feedback: bool = True,
    even: bool = False,
) -> ExpertCoder:
    """Returns the coder of a kernel that all experts share: an error of it is in the outputs of every expert.

    It therefore has the sum of the experts' moments, each weighted by its tokens and their router weights.

    Args:
      layer: its experts.
      name: of the matrix.
      permutations: see `expert_coders`.
      feedback: see `LeastOutputError`.
      even: see `LeastError`.

    Raises:
      InputError: if a weight is not finite.
    """
    if layer.rows is None:
        return LeastError(even=even)
    moment: np.ndarray | None = None
    for own in _moments(layer, name, permutations):
        moment = own.copy() if moment is None else np.add(moment, own, out=moment)
    assert moment is not None
    return LeastOutputError(moment, feedback=feedback, even=even)


def joint_moments(
    layer: SourceLayer, permutations: Int[np.ndarray, "E f"] | None = None
) -> Iterator[dict[str, Float[np.ndarray, "i i"]]]:
    """Yields the second moments of all matrices of one expert after another, by name; none if it is not calibrated.

    Args:
      layer: its experts.
      permutations: see `expert_coders`.

    Raises:
      InputError: if a weight is not finite.
    """
    if layer.rows is None:
        yield from ({} for _ in range(layer.num_experts))
        return
    for of_inputs, of_hidden in zip(moments(layer, "up"), _moments(layer, "down", permutations), strict=True):
        yield {name: of_hidden if name == "down" else of_inputs for name in layer.shapes}


def _moments(
    layer: SourceLayer, name: str, permutations: Int[np.ndarray, "E f"] | None
) -> Iterator[Float[np.ndarray, "i i"]]:
    """Yields the moments of `moments`, with neurons in the given order."""
    for expert, moment in enumerate(moments(layer, name)):
        if name == "down" and permutations is not None:
            order = permutations[expert]
            moment = moment[np.ix_(order, order)]
        yield moment
