"""A pruned kernel as the leaves of a sparse delta."""

import numpy as np
from jaxtyping import Bool, Float

from moe_jax.compress.coding.quantizer import quantize
from moe_jax.experts.config import BankConfig
from moe_jax.experts.places import encode_places


def encode_sparse(
    kernel: Float[np.ndarray, "i o"], mask: Bool[np.ndarray, "i o"], bank: BankConfig, dtype: np.dtype
) -> tuple[dict[str, np.ndarray], Float[np.ndarray, "i o"]]:
    """The leaves of one expert, and the kernel that they stand for, float32.

    Args:
      kernel: float32.
      mask: the entries to store, as many as `bank` says.
      bank: of one matrix; says how places and values are stored.
      dtype: of values that are not quantised.
    """
    positions = np.flatnonzero(mask)
    values = kernel.reshape(-1)[positions]
    leaves = encode_places(positions, kernel.shape, bank.places)
    if bank.bits is None:
        leaves["values"] = values.astype(dtype)
        read_back = leaves["values"].astype(np.float32)
    else:
        made = quantize(values[:, None], bits=bank.bits, group_size=bank.group_size)
        leaves["value_codes"] = np.asarray(made.codes)[:, 0]
        leaves["value_scales"] = np.asarray(made.scales)[:, 0]
        read_back = np.asarray(made.approximation)[:, 0]
    approximation = np.zeros(kernel.shape, np.float32)
    approximation.reshape(-1)[positions] = read_back
    return leaves, approximation
