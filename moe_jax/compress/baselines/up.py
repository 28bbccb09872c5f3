"""`up`: unstructured pruning of the experts themselves (METHODS 5)."""

import dataclasses
from typing import ClassVar, Literal

from moe_jax.compress.baselines.without_centre import WithoutCentre
from moe_jax.compress.residual_forms import Form
from moe_jax.compress.storage import SPARSE


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnstructuredPruning(WithoutCentre):
    """The weights of largest absolute value, stored sparsely.

    Attributes:
      keep: share of the weights that stays, in (0, 1].
      design: `concat`: one threshold for the whole design matrix of an expert, whose shares of the matrices are
        averaged over experts and layers of one shape; `separate`: one for each matrix.
      bits: of the values that stay: 8, 4, 3 or 2; by default floats.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    forms: ClassVar[tuple[str, ...]] = SPARSE

    keep: float
    design: Literal["concat", "separate"] = "concat"
    bits: int | None = None

    def __post_init__(self) -> None:
        self.form()

    def form(self) -> Form:
        """See `WithoutCentre`."""
        return Form(residual="up", keep=self.keep, bits=self.bits, design=self.design, refit=False)
