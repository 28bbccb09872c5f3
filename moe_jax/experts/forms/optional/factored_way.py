"""Optional: a cheaper exact way to multiply rows with what experts add to their base, without making kernels."""

import abc

from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.matrix import Arrays, Matrix, Part


class Factored(abc.ABC):
    """Optional: the deltas alone are multiplied in ways of their own, those that `CostModel.delta_costs` names."""

    @abc.abstractmethod
    def grouped_delta(
        self,
        rows: Float[Array, "M i"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        matrix: Matrix,
        way: str,
        part: Part | None = None,
    ) -> Float[Array, "M o"]:
        """Like `KernelForm.grouped`, but with the deltas alone.

        Args:
          rows, arrays, group_sizes, matrix, part: see there; the base is not among the arrays.
          way: one of the keys of `delta_costs`, except `side-by-side`.
        """


class SideBySide(Factored):
    """Optional: deltas are products of two factors, so that those of all experts are one matrix."""

    @abc.abstractmethod
    def factors(self, arrays: Arrays) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
        """The factors `a` and `b` of all deltas `a b`."""
