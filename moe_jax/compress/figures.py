"""What compression did to the experts of a layer, in figures."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """Over all matrices of a layer's experts, W as it was and W^ as it is now.

    Attributes:
      relative_error: ||W^ - W|| / ||W||, of all experts together.
      delta_error: ||W^ - W|| / ||W - base||; None where every expert equals the base. It is 1 where nothing of the
        deltas is left, and sqrt(p / (1 - p)) for DARE, whose rescaled entries are right only on average.
      cosine_mean, cosine_min: between an expert and the base, mean and least over the experts.
    """

    relative_error: float
    delta_error: float | None
    cosine_mean: float
    cosine_min: float


class Measure:
    """Adds up the figures of a layer, one kernel after another, in the order in which a method comes to them."""

    def __init__(self, num_experts: int):
        # Per expert: |W|^2, |base|^2, W.base, |W - base|^2, |W^ - W|^2.
        self._sums = np.zeros((num_experts, 5))

    def add(self, expert: int, kernel: np.ndarray, base: np.ndarray, approximation: np.ndarray | Array) -> None:
        """Counts one matrix of one expert.

        Args:
          expert: its index.
          kernel, base: [in, out] as they were; `base` as it is stored now.
          approximation: [in, out], what is added to the base now. As it is stored, not rounded to the base's dtype.
        """
        columns = np.asarray(_column_sums(kernel, base, approximation), np.float64)
        self._sums[expert] += columns.sum(axis=1)

    def figures(self) -> LayerFigures:
        weight, base, dot, delta, error = self._sums.T
        norms = np.sqrt(weight * base)
        # An expert of zeros points nowhere; it is no sign of another origin.
        cosines = np.divide(dot, norms, out=np.ones_like(dot), where=norms > 0)
        return LayerFigures(
            relative_error=_ratio(error.sum(), weight.sum()) or 0.0,
            delta_error=_ratio(error.sum(), delta.sum()),
            cosine_mean=float(cosines.mean()),
            cosine_min=float(cosines.min()),
        )


@jax.jit
def _column_sums(
    kernel: Float[Array, "i o"], base: Float[Array, "i o"], approximation: Float[Array, "i o"]
) -> Float[Array, "5 o"]:
    """Sums over rows in float32; the host adds them up in float64, for float32 would lose most of 10^8 terms."""
    kernel, base = kernel.astype(jnp.float32), base.astype(jnp.float32)
    delta = kernel - base
    terms = (kernel * kernel, base * base, kernel * base, delta * delta, (approximation - delta) ** 2)
    return jnp.stack([jnp.sum(term, axis=0) for term in terms])


def _ratio(error: float, norm: float) -> float | None:
    return math.sqrt(error / norm) if norm > 0 else None
