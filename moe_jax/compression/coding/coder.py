"""Numerical methods that make the leaves of compressed experts; see `experts.forms.coding.Coder`.

For a calibrated layer they minimise the change of outputs, else the error of the kernels themselves.
"""

import abc
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import jax
import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from moe_jax.compression.calibration.expert_statistics import moments
from moe_jax.compression.coding.calibrated_codes import (
    DAMPING,
    best_row_scales,
    order_of_inputs,
    quantize_in_order,
    quantize_with_feedback,
    scales_of_magnitudes,
    triangular_factor,
)
from moe_jax.compression.coding.factorization import joint_factors, largest_singular_values, truncated_svd
from moe_jax.compression.coding.half_products import weighed_squares, whitened
from moe_jax.compression.coding.quantizer import quantize
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.experts.forms.coding import Coder, Encoded, JointCoder, MoreOfCodes
from moe_jax.functional.codes import SCALE_DTYPE


class _Quantizing(Coder):
    """Quantises for the least error, whichever that is."""

    fit: bool
    even: bool
    whole_zeros: bool

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        options: dict[str, Any] = {"bits": bits, "group_size": group_size, "fit": self.fit, "even": self.even, **more}
        options["whole_zeros"] = self.whole_zeros
        if not options.pop("row_scales", False):
            return jax.tree.map(np.asarray, self._quantized(values, None, options))
        rows = self._row_scales(values, options)
        made = self._quantized(values / rows[:, None], rows, options)
        leaves = {name: np.asarray(leaf) for name, leaf in made.leaves.items()}
        leaves["row_scales"] = rows[:, None].astype(SCALE_DTYPE)
        return Encoded(leaves, np.asarray(made.approximation) * rows[:, None])

    @abc.abstractmethod
    def _row_scales(self, values: np.ndarray, options: dict[str, Any]) -> Float[np.ndarray, " i"]: ...

    @abc.abstractmethod
    def _quantized(self, values: np.ndarray, rows: np.ndarray | None, options: dict[str, Any]) -> Encoded:
        """Quantises what row scales leave of a kernel: errors of row i count r_i times."""


@dataclass(frozen=True, kw_only=True)
class LeastError(_Quantizing):
    """Codes and factors of the least squared error of the entries."""

    moment: ClassVar[None] = None
    importances: ClassVar[None] = None

    fit: bool = True  # grids and scales of codes are chosen so, and not for the largest absolute value
    even: bool = False  # the grid is always the even one
    whole_zeros: bool = False  # zero points are codes

    def factors(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The singular values go to both factors alike."""
        u, s, v = truncated_svd(matrix, rank)
        root = np.sqrt(s)
        return u * root, v * root

    def _row_scales(self, values: np.ndarray, options: dict[str, Any]) -> Float[np.ndarray, " i"]:
        return scales_of_magnitudes(values, options["group_size"])

    def _quantized(self, values: np.ndarray, rows: np.ndarray | None, options: dict[str, Any]) -> Encoded:
        return quantize(values, weights=None if rows is None else rows**2, **options)


@dataclass(frozen=True, eq=False)
class LeastOutputError(_Quantizing):
    """Codes and factors that change the outputs of a kernel least, for inputs of second moment H [i, i]: tr(E^T H E).

    Attributes:
      moment: H of the kernel's inputs, float32; any multiple of it does the same. Of zeros it counts as the identity.
      fit, even, whole_zeros: see `LeastError`.
      in_order: with feedback, rows of large inputs are coded first (`calibrated_codes`).
      feedback: rows of codes make up for the errors of those before them (`calibrated_codes`). Otherwise every entry is
        rounded on its own, and H says only how much the errors of a row count when scales are chosen.
    """

    moment: Float[np.ndarray, "i i"]
    fit: bool = True
    feedback: bool = True
    even: bool = False
    whole_zeros: bool = False
    in_order: bool = False

    def factors(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the matrix belong to inputs.

        With H = R R^T, the error is the squared norm of R^T E: the best factors are those of R^T W, of which the first
        is taken back by R^-T (SVD-LLM, arXiv 2403.07378, section 3.1).
        """
        left, right = LeastError().factors(np.asarray(whitened(self._factor, matrix)), rank)
        return scipy.linalg.solve_triangular(self._factor, left, trans=1, check_finite=False), right

    def squared(self, error: Float[np.ndarray, "i o"]) -> float:
        """Returns tr(E^T H E)."""
        return float(np.sum(self.squared_columns(error), dtype=np.float64))

    def squared_columns(self, error: Float[np.ndarray, "i o"]) -> Float[np.ndarray, " o"]:
        """Returns what every column has of `squared`."""
        return np.asarray(weighed_squares(self.moment, error))

    def spectrum(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[Float[np.ndarray, " r"], float]:
        """Squares of these numbers are what each of the best `factors` takes from the error; and all that there is."""
        of_outputs = np.asarray(whitened(self._factor, matrix))
        values = largest_singular_values(of_outputs, rank)
        return values, float(np.sum(np.square(of_outputs), dtype=np.float64))

    def _row_scales(self, values: np.ndarray, options: dict[str, Any]) -> Float[np.ndarray, " i"]:
        def coded(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return np.asarray(self._quantized(values, rows, options).approximation)

        return best_row_scales(values, options["group_size"], self.moment, coded)

    def _quantized(self, values: np.ndarray, rows: np.ndarray | None, options: dict[str, Any]) -> Encoded:
        if self.feedback and self.in_order:
            order, moment = order_of_inputs(self.moment), self.moment
            if rows is not None:
                moment = moment * np.outer(rows, rows)
                order = order_of_inputs(moment)
            return quantize_in_order(values, triangular_factor(moment[np.ix_(order, order)]), order, **options)
        if self.feedback:
            factor = self._factor if rows is None else self._factor * rows[:, None]
            return quantize_with_feedback(values, factor, **options)
        weights = self._diagonal + DAMPING * np.mean(self._diagonal)
        return quantize(values, weights=weights if rows is None else weights * rows**2, **options)

    @property
    def importances(self) -> Float[np.ndarray, " i"]:
        """The weight of every row's entries when entries are chosen: the root of H_ii (Wanda, arXiv 2306.11695)."""
        return np.sqrt(self._diagonal)

    @property
    def _diagonal(self) -> Float[np.ndarray, " i"]:
        diagonal = np.diagonal(self.moment)
        return diagonal if diagonal.any() else np.ones_like(diagonal)

    @functools.cached_property
    def _factor(self) -> Float[np.ndarray, "i i"]:
        return triangular_factor(self.moment)


@dataclass(frozen=True, eq=False)
class LeastJointError(JointCoder):
    """Factors all matrices of an expert together; see `experts.forms.coding.JointCoder`.

    With second moments, float32, of what the matrices are given, the outputs change least, and without any the weights.
    """

    moments: Mapping[str, Float[np.ndarray, "i i"]]
    # With a row for every neuron: a centre leaves of them what is factored, and errors are compared with their outputs.
    kernels: Mapping[str, Float[np.ndarray, "f d"]] | None = None

    def factors(
        self, rows: Mapping[str, Float[np.ndarray, "f d"]], rank: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if self.moments:
            return joint_factors(rows, self.kernels, self.moments["up"], self.moments["down"], rank)
        left, right = LeastError().factors(np.concatenate(list(rows.values()), axis=1), rank)
        ends = np.cumsum([matrix.shape[1] for matrix in rows.values()])[:-1]
        return left, dict(zip(rows, np.split(right, ends), strict=True))


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
    """Yields the coder of a matrix for one expert after another, whose neurons may be in another order than stored."""
    if not layer.knows_inputs:
        yield from (LeastError(fit=fit, even=even) for _ in range(layer.num_experts))
        return
    # A map keeps no moment, which is large, while the next one is made.
    how: Any = {"fit": fit, "feedback": feedback, "even": even}
    yield from map(functools.partial(LeastOutputError, **how), _moments(layer, name, permutations))


def shared_base_coder(
    layer: SourceLayer,
    name: str,
    permutations: Int[np.ndarray, "E f"] | None = None,
    *,
    feedback: bool = True,
    even: bool = False,
) -> ExpertCoder:
    """Returns the coder of a kernel that all experts share: with the sum of their moments, for all have its errors."""
    if not layer.knows_inputs:
        return LeastError(even=even)
    every = _moments(layer, name, permutations)
    moment = next(every).copy()
    for own in every:
        moment += own
        del own  # as large as the sum
    return LeastOutputError(moment, feedback=feedback, even=even)


def joint_moments(
    layer: SourceLayer, permutations: Int[np.ndarray, "E f"] | None = None
) -> Iterator[dict[str, Float[np.ndarray, "i i"]]]:
    """The second moments of all matrices of one expert after another, by name; none if it is not calibrated."""
    if not layer.knows_inputs:
        yield from ({} for _ in range(layer.num_experts))
        return

    def by_name(of_inputs: np.ndarray, of_hidden: np.ndarray) -> dict[str, np.ndarray]:
        return {name: of_hidden if name == "down" else of_inputs for name in layer.shapes}

    yield from map(by_name, moments(layer, "up"), _moments(layer, "down", permutations))


def _moments(
    layer: SourceLayer, name: str, permutations: Int[np.ndarray, "E f"] | None
) -> Iterator[Float[np.ndarray, "i i"]]:
    """The moments of `moments`, with neurons in the given order."""
    every = moments(layer, name)
    if name != "down" or permutations is None:
        return every
    return map(lambda moment, order: moment[np.ix_(order, order)], every, permutations)
