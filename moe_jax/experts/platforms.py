"""The costs, per platform, on which the choice of a strategy depends."""

from typing import NamedTuple

import jax

BYTES_PER_ENTRY = 4
"""Of a kernel, when its bytes are estimated."""


class Platform(NamedTuple):
    """Costs in operations of a dense matrix product.

    Attributes:
      operations_per_byte: the operations done in the time that it takes to read one byte from memory.
      per_sparse_entry: to multiply a row with one entry of a sparse kernel; None: nothing does this there, and such a
        product makes dense kernels (`functional.sparse_product`).
      per_scatter: to write one entry of a sparse kernel into a tile.
      per_gather: to look up one entry of a kernel whose positions are a bitmap.
      per_unpack: to unpack one code.
    """

    operations_per_byte: float
    per_sparse_entry: float | None
    per_scatter: float
    per_gather: float
    per_unpack: float


# CPU: measured, 3 ns for an entry at 190 GFLOP/s. Accelerators are estimated, not measured: operations in bfloat16 by
# bytes per second are from the data sheets (H100 295, TPU v5e 240); for a single entry a GPU moves a sector of 32
# bytes, and a TPU takes some nanosecond.
PLATFORMS = {
    "cpu": Platform(operations_per_byte=15, per_sparse_entry=600, per_scatter=1300, per_gather=200, per_unpack=100),
    "gpu": Platform(operations_per_byte=300, per_sparse_entry=None, per_scatter=9600, per_gather=2400, per_unpack=300),
    "tpu": Platform(
        operations_per_byte=240, per_sparse_entry=240_000, per_scatter=240_000, per_gather=24_000, per_unpack=240
    ),
}


def current_platform() -> str:
    """The platform that the program being traced will run on: that of the mesh, or JAX's default.

    A platform that is not in `PLATFORMS` counts as a GPU.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return name if name in PLATFORMS else "gpu"
