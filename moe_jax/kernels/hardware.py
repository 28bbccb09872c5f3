"""The hardware that a program is lowered for: a TPU core and its fast memory, an NVIDIA GPU's capability; sizes."""

import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

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


Capability = tuple[int, int]
"""The compute capability of a GPU, such as (9, 0)."""

# Triton has tensor-core products of these dtypes from Ampere on.
TRITON_FROM: Capability = (8, 0)
_TRITON_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

# Compute capabilities by device name, from NVIDIA's list of CUDA GPUs; the first key that a name contains counts. A
# mesh of GPUs that are not there knows only their name.
_BY_NAME: tuple[tuple[str, Capability], ...] = (
    (r"\bGH200\b|\bH(20|100|200|800)\b", (9, 0)),
    (r"\bG?B300\b", (10, 3)),
    (r"\bG?B(100|200)\b", (10, 0)),
    (r"\bBlackwell\b|\bRTX 50\d\d\b", (12, 0)),
    (r"\bL4\b|\bL40S?\b|\bRTX 40\d\d\b|\bAda\b", (8, 9)),
    (r"\bA(2|10|10G|16|40)\b|\bRTX A\d+\b|\bRTX 30\d\d\b", (8, 6)),
    (r"\bA(30|100|800)\b", (8, 0)),
    (r"\bT4\b|\bRTX 20\d\d\b", (7, 5)),
    (r"\bV100\b", (7, 0)),
)


def compute_capability() -> Capability | None:
    """Returns the compute capability of the GPU that the program is traced for; None: unknown.

    The GPU is that of the mesh in use, else JAX's default device, if that is one. If it is unknown, the program may be
    for any GPU, and nothing may be assumed.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return capability_of(device.device_kind) if device.platform in ("gpu", "cuda") else None
    if jax.default_backend() != "gpu":
        return None
    return _parse(getattr(jax.local_devices()[0], "compute_capability", None))


def capability_of(name: str) -> Capability | None:
    """Returns the compute capability of a GPU by its name, such as `NVIDIA H100 80GB HBM3`; None: unknown."""
    for pattern, capability in _BY_NAME:
        if re.search(pattern, name):
            return capability
    # A GPU that is present can be asked itself.
    if jax.default_backend() == "gpu" and jax.local_devices()[0].device_kind == name:
        return _parse(getattr(jax.local_devices()[0], "compute_capability", None))
    return None


def triton_fits(dtype: DTypeLike, capability: Capability | None) -> bool:
    """Whether Triton's kernels can be used for a dtype; a GPU that is unknown is assumed to be new enough."""
    return jnp.dtype(dtype) in _TRITON_DTYPES and (capability is None or capability >= TRITON_FROM)


def _parse(text: str | None) -> Capability | None:
    found = re.fullmatch(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return math.ceil(size / multiple) * multiple


def bucket(length: int, *, least: int = 16) -> int:
    """Returns the smallest of `least`, 1.5 `least`, 2 `least`, 3 `least`, 4 `least`, ... that is at least `length`.

    One compiled program serves many lengths that are rounded up so. `least` is even, `length` at least 1.
    """
    size = least
    while size < length:
        if 3 * size // 2 >= length:
            return 3 * size // 2
        size *= 2
    return size
