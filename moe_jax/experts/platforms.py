"""What the operations that the choice of a strategy depends on cost, per platform."""

from typing import NamedTuple

import jax

BYTES_PER_ENTRY = 4
"""Of a kernel that is read."""


class Platform(NamedTuple):
    """Costs, in operations of a dense product.

    Attributes:
      operations_per_byte: operations that take as long as one byte from memory.
      per_sparse_entry: of an entry of a sparse kernel that is applied to a row on its own.
      per_scatter: to put an entry into a tile.
      per_gather: to look an entry of a bitmap up.
      per_unpack: to unpack a code.
    """

    operations_per_byte: float
    per_sparse_entry: float
    per_scatter: float
    per_gather: float
    per_unpack: float


# CPU: measured, 3 ns for an entry at 190 GFLOP/s. Accelerators are estimated, not measured: operations in bfloat16 by
# bytes per second are from the data sheets (H100 295, TPU v5e 240); for a single entry a GPU moves a sector of 32
# bytes, and a TPU takes some nanosecond.
PLATFORMS = {
    "cpu": Platform(operations_per_byte=15, per_sparse_entry=600, per_scatter=1300, per_gather=200, per_unpack=100),
    "gpu": Platform(operations_per_byte=300, per_sparse_entry=3600, per_scatter=9600, per_gather=2400, per_unpack=300),
    "tpu": Platform(
        operations_per_byte=240, per_sparse_entry=240_000, per_scatter=240_000, per_gather=24_000, per_unpack=240
    ),
}


def current_platform() -> str:
    """What the program that is traced now will run on: the platform of the mesh, or JAX's default one.

    Platforms that are not in `PLATFORMS` count as a GPU.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return name if name in PLATFORMS else "gpu"
