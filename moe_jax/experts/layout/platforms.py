"""The costs, per platform, on which the choice of a strategy depends."""

from typing import NamedTuple

import jax

from moe_jax.core.data_sheets import CHIPS, Chip, chip_of_kind


class Cost(NamedTuple):
    """Estimated seconds of a way to apply experts, at the peak of the chip.

    Attributes:
      products: in its matrix unit.
      reading: bytes that come from memory or go there.
      making: entries of kernels that are made of what is stored.
    """

    products: float
    reading: float = 0.0
    making: float = 0.0

    @property
    def total(self) -> float:
        """As if one part followed the other: a platform may do them at the same time, but what is less is better."""
        return sum(self)

    @property
    def bound(self) -> str:
        """The part that takes longest: `products`, `bytes`, or `making` of kernels."""
        return max(zip(self, ("products", "bytes", "making"), strict=True))[1]

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(one + two for one, two in zip(self, other, strict=True)))


class Platform(NamedTuple):
    """A chip, the size of numbers on it, and the seconds that single entries take: a choice depends on these.

    Attributes:
      chip: with its peaks, from its maker.
      itemsize: bytes of a number, of activations and of parameters.
      sparse_entry: to multiply a row with one entry of a sparse kernel; None: nothing does this there, and such a
        product makes dense kernels (`functional.sparse_product`).
      scatter: to write one entry of a sparse kernel into a tile.
      gather: to look up one entry of a kernel whose positions are a bitmap.
      unpack: to unpack one code.
    """

    chip: Chip
    itemsize: int
    sparse_entry: float | None
    scatter: float
    gather: float
    unpack: float

    @classmethod
    def of(cls, chip: Chip, itemsize: int) -> "Platform":
        """A chip that multiplies numbers of so many bytes."""
        return cls(chip, itemsize, *_PER_ENTRY[chip.platform](chip))

    @property
    def operations_per_byte(self) -> float:
        """Operations that are done in the time in which one byte is moved."""
        return self.chip.operations_per_second(self.itemsize) / self.chip.bandwidth

    def products(self, operations: float) -> Cost:
        """Returns the cost of so many operations in the matrix unit."""
        return Cost(operations / self.chip.operations_per_second(self.itemsize))

    def reading(self, moved: float) -> Cost:
        """Returns the cost of moving so many bytes."""
        return Cost(0.0, moved / self.chip.bandwidth)


# Seconds per entry: `sparse_entry`, `scatter`, `gather`, `unpack`. On CPU: measured. On accelerators: estimated, not
# measured; for a single entry a GPU moves a sector of 32 bytes, or a quarter of it where neighbours share one, and a
# TPU core takes some nanosecond, which is its vector unit's doing and much the same in all generations.
_PER_ENTRY = {
    "cpu": lambda chip: (3.2e-9, 6.8e-9, 1.05e-9, 0.53e-9),
    "gpu": lambda chip: (None, 32 / chip.bandwidth, 8 / chip.bandwidth, 1 / chip.bandwidth),
    "tpu": lambda chip: tuple(seconds / chip.cores for seconds in (1.2e-9, 1.2e-9, 1.2e-10, 1.2e-12)),
}
# What a device that the table of chips lacks is taken for.
_BY_PLATFORM = {"cpu": "cpu", "tpu": "v5e"}


def current_chip() -> Chip:
    """Returns the chip that the program being traced will run on: of the mesh in use, or else of JAX's default backend.

    A device that the table of chips lacks counts as a v5e if it is a TPU, and as an H100 if it is no CPU.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        kind, platform = device.device_kind, device.platform
    else:
        platform = jax.default_backend()
        kind = platform if platform == "cpu" else jax.local_devices()[0].device_kind
    return chip_of_kind(kind) or CHIPS[_BY_PLATFORM.get(platform, "h100")]
