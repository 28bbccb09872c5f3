"""The numerical methods by which the leaves of compressed experts are made; see `experts.forms.protocol.Coder`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from moe_jax.compress.coding.quantizer import quantize
from moe_jax.compress.coding.truncated_svd import truncated_svd
from moe_jax.experts.forms.protocol import Encoded


@dataclass(frozen=True)
class LeastError:
    """What has the least squared error.

    Attributes:
      fit: grids and scales of codes are chosen so, and not for the largest absolute value.
    """

    fit: bool = True

    def factors(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Coder`. The singular values go to both factors alike."""
        u, s, v = truncated_svd(matrix, rank)
        root = np.sqrt(s)
        return u * root, v * root

    def quantize(self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None) -> Encoded:
        """See `Coder`."""
        return Encoded(*map(np.asarray, quantize(values, bits=bits, group_size=group_size, fit=self.fit)))
