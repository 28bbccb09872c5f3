"""Describes NVIDIA GPUs that are absent, for the compiler: XLA:GPU compiles for a description as well as for a GPU.

A topology is named by the GPU, then how many hosts and how many GPUs on each: `h100:2x8`, or `h100:8` for one host.
"""

import importlib.util
import os
import re
from typing import Any, NamedTuple

from moe_jax.core.data_sheets import chip_of_kind
from moe_jax.core.errors import InputError, first_line, shown

# The plugin gives up where there is no driver, unless it is told not to look.
_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


class GPU(NamedTuple):
    """A GPU as XLA has to know it, from CUDA's device properties; its memory is in `moe_jax.core.data_sheets`.

    Attributes:
      name: as the driver reports it.
      capability: compute capability.
      cores: number of streaming multiprocessors.
      fpus: float32 units of each.
      shared_kib: shared memory of each; a program may have 1 KiB less.
      l2_mib: second-level cache.
      clock_ghz: highest clock rate.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    shared_kib: int
    l2_mib: float
    clock_ghz: float


GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228, 50, 1.98),
    "h200": GPU("NVIDIA H200", (9, 0), 132, 128, 228, 50, 1.98),
    "b200": GPU("NVIDIA B200", (10, 0), 148, 128, 228, 126.5, 1.965),
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164, 40, 1.41),
}

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


def prepare_environment() -> None:
    """Lets JAX use the plugin without a driver; call it before JAX is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def is_gpu(topology: str) -> bool:
    """Whether a topology is one of GPUs."""
    return topology.partition(":")[0] in GPUS


def has_plugin() -> bool:
    """Whether XLA:GPU is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def shape_of(topology: str) -> tuple[int, int]:
    """Returns the number of hosts, and of GPUs on each.

    Raises:
      InputError: there is no such topology.
    """
    name, _, shape = topology.partition(":")
    if name not in GPUS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape):
        raise InputError(f"unknown topology {shown(topology)}, expected for example h100:8 or h100:2x8")
    sizes = [int(size) for size in shape.split("x")]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (1, sizes[0])


def gpu_devices(topology: str) -> list[Any]:
    """Returns the devices of a topology such as `h100:2x8`, for a mesh.

    Raises:
      InputError: there is no such topology, or no compiler for it.
    """
    name = topology.partition(":")[0]
    hosts, on_each = shape_of(topology)
    if not has_plugin():
        raise InputError("--compile-only for GPUs needs XLA:GPU: pip install 'moe-jax[gpu]' (Linux; no GPU is needed)")
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            platform="cuda", topology_name=name, target_config=target(GPUS[name]), topology=f"1x{hosts}x{on_each}"
        )
    except Exception as error:  # the plugin's own errors have no common class
        raise InputError(f"XLA:GPU has no devices {shown(topology)}: {first_line(error)}") from None
    return list(described.devices)


def target(gpu: GPU) -> str:
    """Returns XLA's description of a GPU, a `GpuTargetConfigProto` as text."""
    shared, chip = gpu.shared_kib * 1024, chip_of_kind(gpu.name)
    assert chip is not None, f"{gpu.name} is not in the table of chips"
    return _TARGET.format(
        gpu=gpu,
        chip=chip,
        bandwidth=round(chip.bandwidth),
        shared=shared,
        shared_by_request=shared - 1024,
        l2=round(gpu.l2_mib * 2**20),
    )
