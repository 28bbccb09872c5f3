"""The devices that training is planned and compiled for: those of this machine, or of a slice or server only named.

The `libtpu` wheel holds the TPU compiler and runs on any x86 CPU machine; JAX's CUDA plugin holds XLA:GPU, which
compiles for a description of a GPU as well as for a GPU, without a driver. A topology of TPUs is named as in `v5e:4x4`;
one of GPUs by the GPU, then how many hosts and how many GPUs on each: `h100:2x8`, or `h100:8` for one host.
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

from moe_jax.core.data_sheets import CHIPS, Chip, chip_of_kind
from moe_jax.core.errors import InputError, check_member, first_line, shown
from moe_jax.planning.slice_names import SIDES, topology_of
from moe_jax.training.recipe import MeshSection

# libtpu asks a metadata server for the machine's type unless the environment gives one. Any TPU type will do: the
# compiler is told separately which topology to compile for.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Several compilations may use the library at a time, because none of them uses a chip.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # The CUDA plugin gives up where there is no driver, unless it is told not to look.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def prepare_environment() -> None:
    """Describes a TPU to libtpu, lets JAX use the CUDA plugin without a driver, and keeps JAX itself on the CPU.

    Call it before JAX is imported.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["JAX_PLATFORMS"] = "cpu"


class GPU(NamedTuple):
    """A GPU as XLA has to know it, from CUDA's device properties; its memory is in `moe_jax.core.data_sheets`."""

    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    fpus: int  # float32 units of each
    shared_kib: int  # of each; a program may have 1 KiB less
    l2_mib: float
    clock_ghz: float


GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228, 50, 1.98),
    "h200": GPU("NVIDIA H200", (9, 0), 132, 128, 228, 50, 1.98),
    "b200": GPU("NVIDIA B200", (10, 0), 148, 128, 228, 126.5, 1.965),
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164, 40, 1.41),
}

# A `GpuTargetConfigProto` of XLA, as text.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_by_request}
  core_count: {gpu.cores} fpus_per_core: {gpu.fpus} l2_cache_size: {l2} clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.memory} memory_bandwidth: {bandwidth}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
device_description_str: "{gpu.name}"
"""


def is_gpu(topology: str) -> bool:
    """Whether a topology is one of GPUs."""
    return topology.partition(":")[0] in GPUS


def has_gpu_compiler() -> bool:
    """Whether XLA:GPU is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def has_tpu_compiler() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def gpu_hosts(topology: str) -> tuple[int, int]:
    """Returns the number of hosts of a topology of GPUs, and of GPUs on each; raises `InputError` for others."""
    name, _, shape = topology.partition(":")
    if name not in GPUS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape):
        raise InputError(f"unknown topology {shown(topology)}, expected for example h100:8 or h100:2x8")
    sizes = [int(size) for size in shape.split("x")]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (1, sizes[0])


def described_devices(topology: str) -> list[Any]:
    """Returns the devices of a topology such as `v5e:4x4` or `h100:8`, for a mesh.

    Raises `InputError` if there is no compiler for the topology, or it is unknown.
    """
    wanted = {"platform": "tpu", "topology_name": topology}
    refused = f"unknown topology {shown(topology)}, expected for example v5e:4x4, v5p:2x2x4, v6e:8x8 or h100:8"
    if is_gpu(topology):
        wanted, refused = _described_gpus(topology), f"XLA:GPU has no devices {shown(topology)}"
    elif not has_tpu_compiler():
        raise InputError("--compile-only needs the TPU compiler: pip install 'moe-jax[tpu]' (libtpu, x86 Linux)")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(**wanted).devices)
    except Exception as error:  # the plugins' own errors have no common class
        raise InputError(f"{refused}: {first_line(error)}") from None


def _described_gpus(topology: str) -> dict[str, Any]:
    """Returns a topology of GPUs as XLA takes it."""
    name = topology.partition(":")[0]
    hosts, on_each = gpu_hosts(topology)
    if not has_gpu_compiler():
        raise InputError("--compile-only for GPUs needs XLA:GPU: pip install 'moe-jax[gpu]' (Linux; no GPU is needed)")
    gpu, chip = GPUS[name], chip_of_kind(GPUS[name].name)
    assert chip is not None, f"{gpu.name} is not in the table of chips"
    shared, l2, bandwidth = gpu.shared_kib * 1024, round(gpu.l2_mib * 2**20), round(chip.bandwidth)
    target = _TARGET.format(
        gpu=gpu, chip=chip, bandwidth=bandwidth, shared=shared, shared_by_request=shared - 1024, l2=l2
    )
    shape = f"1x{hosts}x{on_each}"
    return {"platform": "cuda", "topology_name": name, "target_config": target, "topology": shape}


# The smallest slices that the TPU compiler knows; a step for fewer chips uses some of them.
_SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_OF_SLICE = 4
_GPUS_OF_HOST = 8


class PlannedDevices(NamedTuple):
    """The devices that training is planned for.

    Attributes:
      devices: for the mesh; None: their compiler is not installed, or none is needed.
      chip: in the table of data sheets; None: it is not there.
      missing: the compiler that is not installed; empty: the step is not to be compiled.
      per_host: devices of a host, if others are reached over the network.
    """

    name: str
    devices: list[Any] | None
    count: int
    chip: Chip | None
    missing: str = ""
    per_host: int | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are CPUs, which share memory and rates."""
        return self.devices is not None and self.devices[0].platform == "cpu"


_MOST_CHIPS = 2**16
"""More than any slice or cluster has: a number with more digits is a mistake, and has more meshes than can be tried."""
_PLATFORMS = "a topology such as v5e:4x4, v5p:2x2x4 or h100:2x8, or a slice such as v5p-16"


def check_platform(platform: str) -> tuple[str, Chip]:
    """Returns a platform other than this machine with the topology that its name stands for, and its chip.

    Raises:
      InputError: an unknown chip, or a topology that it does not have.
    """
    named = topology_of(platform)
    name, colon, shape = named.partition(":")
    if "-" in name and name.partition("-")[0].lower() in CHIPS:
        raise InputError(f"--platform {shown(platform)}: expected {_PLATFORMS}")
    check_member("--platform", name, tuple(CHIPS))
    chip = CHIPS[name]
    if not colon:
        return named, chip
    sides = (1, 2) if chip.platform == "gpu" else (1, SIDES.get(name, 3))
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}", shape) else []
    if chip.platform == "cpu" or len(sizes) not in sides or math.prod(sizes) > _MOST_CHIPS:
        at_most = f", of at most {_MOST_CHIPS:,} chips" if math.prod(sizes) > _MOST_CHIPS else ""
        raise InputError(f"--platform {shown(platform)}: expected {_PLATFORMS}{at_most}")
    return named, chip


def planned_devices(mesh: MeshSection, platform: str | None, *, compiles: bool) -> PlannedDevices:
    """Returns the devices of a platform.

    Args:
      mesh: of the recipe; for a chip without a topology, the number of devices is the least that the mesh needs.
      platform: `cpu`, the name of a chip, or a topology such as `v5e:4x4`, `v5p-16` or `h100:2x8`. None: those of this
        machine.
      compiles: whether a step is to be compiled for them. If not, only their number and data sheet are known, except
        for a CPU.

    Raises:
      InputError: an unknown platform, or more chips than fit into the smallest slice if no topology is named.
    """
    if platform in (None, "cpu"):
        import jax  # here: `prepare_environment` comes before it

        devices = jax.devices() if platform is None else jax.devices("cpu")
        kind = devices[0].device_kind
        name = "this machine's CPU" if devices[0].platform == "cpu" else f"this machine: {kind}"
        return PlannedDevices(name, list(devices), len(devices), chip_of_kind(kind))
    assert platform is not None
    platform, chip = check_platform(platform)
    name, colon, shape = platform.partition(":")
    least = math.prod(size for size in dataclasses.astuple(mesh) if size != -1)
    count = math.prod(int(size) for size in shape.split("x")) if colon else least
    # Of `4x8` a host has 8; otherwise as many as usual, or all if there are fewer.
    of_host = int(shape.split("x")[-1]) if "x" in shape else min(count, _GPUS_OF_HOST)
    per_host = of_host if chip.platform == "gpu" else None
    if not compiles and chip.platform != "cpu":
        return PlannedDevices(platform, None, count, chip, "", per_host)
    if chip.platform == "gpu":
        if name not in GPUS or not has_gpu_compiler():
            return PlannedDevices(platform, None, count, chip, "XLA:GPU (moe-jax[gpu])", per_host)
        return PlannedDevices(platform, described_devices(platform if colon else f"{name}:{count}"), count, chip)
    if not has_tpu_compiler():
        return PlannedDevices(platform, None, count, chip, "the TPU compiler (moe-jax[tpu])")
    if colon:
        return PlannedDevices(platform, described_devices(platform), count, chip)
    if name not in _SLICES or count > _OF_SLICE:
        raise InputError(f"--platform {name}: the mesh needs {count} chips; name the slice, as in {name}:4x4 or 2x2x4")
    return PlannedDevices(platform, described_devices(_SLICES[name])[:count], count, chip)
