"""Experts in codes for other libraries: the format of `convert`, and codes made by `compress`."""

from functools import partial

import numpy as np

from moe_jax.compression.coding.coder import LeastError
from moe_jax.conversion.formats.packed_experts import Codes, Packing
from moe_jax.conversion.to_hugging_face import Pack

_CODER = LeastError(even=True)


def packed_experts(bits: int | None = None, group_size: int | None = None) -> Pack:
    """How `convert.export` writes experts in codes; see `Packing.of`."""
    return partial(Packing.of, quantise=_codes, bits=bits, group_size=group_size)


def _codes(kernel: np.ndarray, bits: int, group_size: int) -> Codes:
    made = _CODER.quantize(kernel, bits=bits, group_size=group_size)
    return Codes(made.codes, made.scales)
