"""`svd`: low-rank factors of the experts themselves (METHODS 5)."""

import dataclasses
from typing import ClassVar, Literal

from moe_jax.compress.baselines.without_centre import WithoutCentre
from moe_jax.compress.residual_forms import Form
from moe_jax.compress.storage import LOW_RANK


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVD(WithoutCentre):
    """Truncated singular value decompositions of the kernels; biases stay as they are.

    Attributes:
      keep: share of the numbers that are stored, in (0, 1]; the ranks follow. With 1, factors take as much as the
        experts and are not yet of full rank.
      design: `concat`: of the design matrix of an expert, whose factor over the neurons is stored once; `separate`: of
        every kernel.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    forms: ClassVar[tuple[str, ...]] = LOW_RANK

    keep: float
    design: Literal["concat", "separate"] = "concat"

    def __post_init__(self) -> None:
        self.form()

    def form(self) -> Form:
        """See `WithoutCentre`."""
        return Form(residual="svd", keep=self.keep, design=self.design, refit=False)
