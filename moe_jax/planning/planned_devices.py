"""The devices that training is planned for: those of this machine, or of a slice or server that is only named."""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax

from moe_jax.core.data_sheets import CHIPS, Chip, chip_of_kind
from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.planning import gpu_topology
from moe_jax.planning.compile_only import described_devices, has_tpu_compiler
from moe_jax.training.recipe import MeshSection

# The smallest slices that the TPU compiler knows; a step for fewer chips uses some of them.
_SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_OF_SLICE = 4
_GPUS_OF_HOST = 8


class PlannedDevices(NamedTuple):
    """Attributes:
    name: as it is printed.
    devices: for the mesh; None: their compiler is not installed, or none is needed.
    count: number of devices.
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


def planned_devices(mesh: MeshSection, platform: str | None, *, compiles: bool) -> PlannedDevices:
    """Returns the devices of a platform.

    Args:
      mesh: of the recipe; for a chip without a topology, the number of devices is the least that the mesh needs.
      platform: `cpu`, the name of a chip, or a topology such as `v5e:4x4` or `h100:2x8`. None: those of this machine.
      compiles: whether a step is to be compiled for them. If not, only their number and data sheet are known, except
        for a CPU.

    Raises:
      InputError: an unknown platform, or more chips than fit into the smallest slice if no topology is named.
    """
    if platform in (None, "cpu"):
        devices = jax.devices() if platform is None else jax.devices("cpu")
        kind = devices[0].device_kind
        name = "this machine's CPU" if devices[0].platform == "cpu" else f"this machine: {kind}"
        return PlannedDevices(name, list(devices), len(devices), chip_of_kind(kind))
    assert platform is not None
    name, colon, shape = platform.partition(":")
    check_member("--platform", name, tuple(CHIPS))
    chip = CHIPS[name]
    if colon and (chip.platform == "cpu" or not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}", shape)):
        raise InputError(f"--platform {shown(platform)}: expected a topology such as v5e:4x4, v5p:2x2x4 or h100:2x8")
    count = math.prod(int(size) for size in shape.split("x")) if colon else _least(mesh)
    per_host = _per_host(shape, count) if chip.platform == "gpu" else None
    if not compiles and chip.platform != "cpu":
        return PlannedDevices(platform, None, count, chip, "", per_host)
    if chip.platform == "gpu":
        if name not in gpu_topology.GPUS or not gpu_topology.has_plugin():
            return PlannedDevices(platform, None, count, chip, "XLA:GPU (moe-jax[gpu])", per_host)
        return PlannedDevices(platform, described_devices(platform if colon else f"{name}:{count}"), count, chip)
    if not has_tpu_compiler():
        return PlannedDevices(platform, None, count, chip, "the TPU compiler (moe-jax[tpu])")
    if colon:
        return PlannedDevices(platform, described_devices(platform), count, chip)
    if name not in _SLICES or count > _OF_SLICE:
        raise InputError(f"--platform {name}: the mesh needs {count} chips; name the slice, as in {name}:4x4 or 2x2x4")
    return PlannedDevices(platform, described_devices(_SLICES[name])[:count], count, chip)


def _least(mesh: MeshSection) -> int:
    """Returns the least number of devices that a mesh needs."""
    return math.prod(size for size in dataclasses.astuple(mesh) if size != -1)


def _per_host(shape: str, count: int) -> int:
    """Returns the GPUs of a host: for `4x8` they are 8, otherwise as many as a host has, or all if there are fewer."""
    return int(shape.split("x")[-1]) if "x" in shape else min(count, _GPUS_OF_HOST)
