"""Properties of a TPU that kernels depend on: its fast memory (VMEM), and the bytes that blocks take there."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.core.data_sheets import CHIPS

MIB = 1 << 20
RESERVED = 8 * MIB
"""Bytes that the compiler needs besides the blocks of a kernel."""
LANES = 128


class Core(NamedTuple):
    """The properties of a TPU core that sizes of blocks depend on.

    Attributes:
      vmem: bytes of fast memory.
      cores: number of cores that share a chip, between which a kernel is divided.
      rows: rows of a product that keep the matrix unit busy: as many as the unit has rows of weights.
    """

    vmem: int
    cores: int
    rows: int


_CORES = {
    kind: Core(chip.vmem, chip.cores, chip.matrix_rows) for chip in CHIPS.values() if chip.vmem for kind in chip.kinds
}
ANY_CORE = Core(64 * MIB, 2, 128)
"""Blocks that fit here fit on every TPU."""


def current_core() -> Core:
    """Returns the core of the device of the mesh in use; without a mesh, or for another device, `ANY_CORE`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return ANY_CORE if device is None else _CORES.get(device.device_kind, ANY_CORE)


def block_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Returns the bytes of a block in fast memory: rows are padded to 128 entries, columns to 32 bytes or one entry."""
    itemsize = jnp.dtype(dtype).itemsize
    *leading, rows, columns = shape
    rows = 1 if rows == 1 else round_up(rows, 32 // itemsize)
    return math.prod(leading) * rows * round_up(columns, LANES) * itemsize


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return math.ceil(size / multiple) * multiple
