"""What kernels have to know of the chip: its fast memory (VMEM), and what blocks take of it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.core.data_sheets import CHIPS

MIB = 1 << 20
RESERVED = 8 * MIB
"""What the compiler needs besides the blocks of a kernel."""
LANES = 128


class Core(NamedTuple):
    """What the size of blocks depends on.

    Attributes:
      vmem: bytes of fast memory.
      cores: that share a chip, and between which a kernel is divided.
      rows: of a product that keeps the matrix unit busy: as many as it has rows of weights.
    """

    vmem: int
    cores: int
    rows: int


_CORES = {
    kind: Core(chip.vmem, chip.cores, chip.matrix_rows) for chip in CHIPS.values() if chip.vmem for kind in chip.kinds
}
ANY_CORE = Core(64 * MIB, 2, 128)
"""Blocks that fit here fit everywhere."""


def current_core() -> Core:
    """Of the device of the mesh in use; where there is no mesh, or one of another device, `ANY_CORE`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return ANY_CORE if device is None else _CORES.get(device.device_kind, ANY_CORE)


def block_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Bytes of a block in fast memory, where rows are padded to 128 entries and columns to 32 bytes or one entry."""
    itemsize = jnp.dtype(dtype).itemsize
    *leading, rows, columns = shape
    rows = 1 if rows == 1 else round_up(rows, 32 // itemsize)
    return math.prod(leading) * rows * round_up(columns, LANES) * itemsize


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below the size."""
    return math.ceil(size / multiple) * multiple
