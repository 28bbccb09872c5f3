"""The numerical methods by which the leaves of compressed experts are made; see `experts.forms.protocol.Coder`."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import jax
import numpy as np
import scipy.linalg
from jaxtyping import Float

from moe_jax.compress.coding.feedback import DAMPING, quantize_with_feedback, triangular_factor
from moe_jax.compress.coding.quantizer import quantize
from moe_jax.compress.coding.truncated_svd import truncated_svd
from moe_jax.experts.forms.encoded import Encoded, MoreOfCodes


@dataclass(frozen=True)
class LeastError:
    """What has the least squared error.

    Attributes:
      fit: grids and scales of codes are chosen so, and not for the largest absolute value.
      even: the grid is always the even one.
    """

    moment: ClassVar[None] = None
    importances: ClassVar[None] = None

    fit: bool = True
    even: bool = False

    def factors(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Coder`. The singular values go to both factors alike."""
        u, s, v = truncated_svd(matrix, rank)
        root = np.sqrt(s)
        return u * root, v * root

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        """See `Coder`."""
        made = quantize(values, bits=bits, group_size=group_size, fit=self.fit, even=self.even, **more)
        return jax.tree.map(np.asarray, made)


@dataclass(frozen=True, eq=False)
class LeastOutputError:
    """What changes the outputs of a kernel least, for inputs whose second moment H [i, i] is known: tr(E^T H E).

    Attributes:
      moment: H of the kernel's inputs, float32; any multiple of it does the same. Of zeros it counts as the identity.
      fit, even: see `LeastError`.
      feedback: rows of codes make up for the errors of those before them (`coding.feedback`). Otherwise every entry is
        rounded on its own, and H says only how much the errors of a row count when scales are chosen.
    """

    moment: Float[np.ndarray, "i i"]
    fit: bool = True
    feedback: bool = True
    even: bool = False

    def factors(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Coder`. Rows of the matrix belong to inputs.

        With H = R R^T, the error is the squared norm of R^T E: the best factors are those of R^T W, of which the first
        is taken back by R^-T (SVD-LLM, arXiv 2403.07378, section 3.1).
        """
        u, s, v = truncated_svd(self._factor.T @ matrix, rank)
        root = np.sqrt(s)
        return scipy.linalg.solve_triangular(self._factor, u * root, trans=1, check_finite=False), v * root

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        """See `Coder`."""
        options: dict[str, Any] = {"bits": bits, "group_size": group_size, "fit": self.fit, "even": self.even, **more}
        if self.feedback:
            made = quantize_with_feedback(values, self._factor, **options)
        else:
            weights = self._diagonal + DAMPING * np.mean(self._diagonal)
            made = quantize(values, weights=weights, **options)
        return jax.tree.map(np.asarray, made)

    @property
    def importances(self) -> Float[np.ndarray, " i"]:
        """What an entry of each row counts for when entries are chosen: the root of H_ii (Wanda, arXiv 2306.11695)."""
        return np.sqrt(self._diagonal)

    @property
    def _diagonal(self) -> Float[np.ndarray, " i"]:
        diagonal = np.diagonal(self.moment)
        return diagonal if diagonal.any() else np.ones_like(diagonal)

    @functools.cached_property
    def _factor(self) -> Float[np.ndarray, "i i"]:
        return triangular_factor(self.moment)
