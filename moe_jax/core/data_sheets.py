"""Speeds and sizes of accelerators, by their makers' word; and the memory of this machine.

The one table for rooflines, memory and sizes of blocks. A roofline is the least time that a program can take: that of
its products at the peak of the matrix units, or that of its bytes at the bandwidth of the memory, whichever is longer.
No program reaches either.
"""

import contextlib
import resource
import sys
from pathlib import Path
from typing import NamedTuple

_GIB = 1 << 30
_MIB = 1 << 20


class Chip(NamedTuple):
    """A device of JAX's.

    Attributes:
      name: as options take it.
      platform: `cpu`, `gpu` or `tpu`.
      kinds: what JAX calls the device (`device_kind`); the compiler's name comes first.
      bfloat16: operations per second in products of bfloat16 with sums in float32, none of them saved by sparsity.
      float32: of float32, as the platform multiplies it where it is asked for full precision.
      bandwidth: of the memory, bytes per second.
      memory: bytes of it; None: not a property of the chip.
      vmem: bytes of fast memory of a TPU core; 0: kernels are not compiled for it here.
      cores: TPU cores that share a device.
      matrix_rows: rows of weights that a TPU's matrix unit holds.
      link: bytes per second that go from a device to others of its slice or host, along one axis of a torus and in one
        direction in all, both ways round; 0: not known.
      network: bytes per second that go from a device to those of other hosts; 0: all are in one slice.
      source: of the figures.
    """

    name: str
    platform: str
    kinds: tuple[str, ...]
    bfloat16: float
    float32: float
    bandwidth: float
    memory: int | None
    source: str
    vmem: int = 0
    cores: int = 1
    matrix_rows: int = 0
    link: float = 0.0
    network: float = 0.0

    def operations_per_second(self, itemsize: int) -> float:
        """Returns the peak for products of numbers of `itemsize` bytes; those of one or two count as bfloat16."""
        return self.float32 if itemsize >= 4 else self.bfloat16


_TPU_DOCS = "https://docs.cloud.google.com/tpu/docs"
# No document has the float32 peak of a TPU: XLA and Mosaic make a product of full precision of six in bfloat16. The
# sizes of fast memory and of the matrix units are those of JAX's own table (`pallas.tpu.get_tpu_info`). The documents
# have what all links of a chip carry in one direction: 1600 Gb/s of a v5e's torus of two axes, 3200 of a v6e's, and
# 4800 of a v5p's of three.
_TPUS = (
    Chip("v4", "tpu", ("TPU v4",), 275e12, 275e12 / 6, 1.2e12, 32 * _GIB, f"{_TPU_DOCS}/v4"),
    Chip(
        "v5e", "tpu", ("TPU v5 lite", "TPU v5e"), 197e12, 197e12 / 6, 0.819e12, 16 * _GIB, f"{_TPU_DOCS}/v5e",
        128 * _MIB, 1, 128, 200e9 / 2,
    ),
    Chip(
        "v5p", "tpu", ("TPU v5", "TPU v5p"), 459e12, 459e12 / 6, 2.765e12, 95 * _GIB, f"{_TPU_DOCS}/v5p",
        64 * _MIB, 2, 128, 600e9 / 3,
    ),
    Chip(
        "v6e", "tpu", ("TPU v6 lite", "TPU v6e"), 918e12, 918e12 / 6, 1.638e12, 32 * _GIB, f"{_TPU_DOCS}/v6e",
        128 * _MIB, 1, 256, 400e9 / 2,
    ),
    # JAX calls each half of this chip a device; the document has 2307e12, 7.38e12 and 192 GiB for the whole.
    Chip("v7x", "tpu", ("TPU7x",), 1153.5e12, 1153.5e12 / 6, 3.69e12, 96 * _GIB, f"{_TPU_DOCS}/tpu7x"),
)  # fmt: skip
# Data sheets give the H100 twice these, with sparsity. Memory is what the driver leaves to programs; bandwidths are not
# rounded: 5120 bits at the clock of the memory. NVLink is half of what the sheets give for both directions; the network
# is that of NVIDIA's DGX systems, one adapter for a GPU: 400 Gb/s (DGX H100, H200, B200) and 200 Gb/s (DGX A100).
_GPUS = (
    Chip(
        "h100", "gpu", ("NVIDIA H100 80GB HBM3",), 989.4e12, 67e12, 3.35232e12, 84_942_979_072,
        "NVIDIA H100 data sheet, SXM: https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
        link=450e9, network=50e9,
    ),
    Chip(
        "h200", "gpu", ("NVIDIA H200", "NVIDIA H200 141GB HBM3e"), 989.4e12, 67e12, 4.8e12, 151_397_597_184,
        "NVIDIA H200 data sheet, SXM: https://www.nvidia.com/en-us/data-center/h200",
        link=450e9, network=50e9,
    ),
    Chip(
        "b200", "gpu", ("NVIDIA B200",), 2250e12, 75e12, 7.67232e12, 191_514_411_008,
        "NVIDIA DGX B200 data sheet, an eighth of it: https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet",
        link=900e9, network=50e9,
    ),
    Chip(
        "a100", "gpu", ("NVIDIA A100-SXM4-80GB",), 312e12, 19.5e12, 2.039e12, 84_986_691_584,
        "NVIDIA A100 80GB data sheet, SXM: nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        link=300e9, network=25e9,
    ),
)  # fmt: skip
_CPU = Chip("cpu", "cpu", ("cpu",), 180e9, 190e9, 12.7e9, None, "measured on two threads of one core of an AMD EPYC")

CHIPS = {chip.name: chip for chip in (*_TPUS, *_GPUS, _CPU)}
_BY_KIND = {kind: chip for chip in CHIPS.values() for kind in chip.kinds}


def chip_of_kind(kind: str) -> Chip | None:
    """The chip with a `device_kind`; None if the table lacks it."""
    return _BY_KIND.get(kind)


def available_memory() -> int | None:
    """Bytes that can be used without swapping, as Linux estimates them; None on other systems."""
    return _in_kib("/proc/meminfo", "MemAvailable")


def total_memory() -> int | None:
    """Bytes of memory of this machine; None on other systems than Linux."""
    return _in_kib("/proc/meminfo", "MemTotal")


def resident_memory() -> int | None:
    """Bytes of memory that this process has now; None on other systems than Linux."""
    return _in_kib("/proc/self/status", "VmRSS")


def peak_memory_bytes() -> int:
    """Highest resident memory of this process so far."""
    # On Linux, where the figure below includes the memory of the parent process when it started this one.
    highest = _in_kib("/proc/self/status", "VmHWM")
    if highest is not None:
        return highest
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def _in_kib(file: str, name: str) -> int | None:
    """A line `NAME:  123 kB` of a file, in bytes; None: there is none."""
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in Path(file).read_text("utf-8").splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024
    return None
