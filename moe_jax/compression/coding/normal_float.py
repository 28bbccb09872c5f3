"""NF4 as published: the nearest of the levels of normal numbers, by the largest magnitude of a group.

Dettmers et al. 2023 (QLoRA, arXiv 2305.14314), section 3. Nothing is fitted. Levels are rounded to bfloat16, as those
of every table here are, and scales have the eight bits of `packing`, not the blocks and levels of the paper.
"""

from dataclasses import dataclass
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.compression.coding.coder import LeastError
from moe_jax.compression.coding.quantizer import nearest_codes, stored
from moe_jax.experts.forms.coding import Encoded, MoreOfCodes
from moe_jax.functional.products.nf4 import LEVELS
from moe_jax.functional.products.packing import SCALE_DTYPE, Grid, scale_leaves, scales_of


@dataclass(frozen=True)
class NormalFloat(LeastError):
    """Codes of four bits with the table of NF4."""

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        """Quantises to four bits in groups, with a table."""
        assert bits == 4 and group_size is not None and more.get("table")
        made = normal_float(values, group_size=group_size, scale_bits=more.get("scale_bits", 16))
        return jax.tree.map(np.asarray, made)


@partial(jax.jit, static_argnames=("group_size", "scale_bits"))
def normal_float(kernel: Float[Array, "i o"], *, group_size: int, scale_bits: int) -> Encoded:
    """Quantises a float32 kernel; see `quantizer.quantize`."""
    rows, width = kernel.shape
    groups = jnp.pad(kernel, ((0, -rows % group_size), (0, 0))).reshape(-1, group_size, width)
    scales = scales_of(scale_leaves(jnp.max(jnp.abs(groups), axis=1), scale_bits))[:, None, :]
    grid = Grid(scales, jnp.asarray(LEVELS).astype(SCALE_DTYPE).astype(jnp.float32))
    return stored(nearest_codes(groups, grid, 4), grid, rows, 4, group_size, scale_bits)
