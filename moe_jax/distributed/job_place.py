"""The place of this process among those of a job, from environment variables and cluster managers."""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import moe_jax
from moe_jax.core.errors import InputError, shown

VARIABLE = "MOE_JAX_DISTRIBUTED"
LOCAL_DEVICES = "MOE_JAX_LOCAL_DEVICES"
_SECONDS = {"MOE_JAX_DISTRIBUTED_WAIT": 300.0, "MOE_JAX_DISTRIBUTED_SILENCE": 20.0}


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process, `index` from 0, among all processes of a job; the first one listens at `address`.

    `local_devices` are indices of this machine's accelerators that belong to this process; None: all.
    """

    address: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None

    @property
    def port(self) -> int:
        """Port at which the first process listens."""
        return int(self.address.rpartition(":")[2])

    @property
    def host(self) -> str:
        """Host on which the first process listens."""
        return self.address.rpartition(":")[0].strip("[]")


def find_place() -> Place | None:
    """Returns the place of this process from `MOE_JAX_DISTRIBUTED`; None: it is alone.

    Raises:
      InputError: if the value is neither `auto`, where there is a cluster that JAX knows, nor `HOST:PORT,N,I`.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    place = _detected() if value == "auto" else _parsed(value)
    return None if place.count == 1 else place


def waits() -> tuple[float, float]:
    """Returns seconds: how long processes wait for each other at the start, and how long one may be silent."""
    found = []
    for name, default in _SECONDS.items():
        text = os.environ.get(name) or str(default)
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 1 <= seconds <= 1e6:
            raise InputError(f"{name}={shown(text)}: expected seconds, from 1 to 1000000")
        found.append(seconds)
    return found[0], found[1]


def expected_local_devices() -> int | None:
    """Returns the number of accelerators that this process must find, from the environment or Slurm; None: any."""
    value = os.environ.get(LOCAL_DEVICES)
    if value:
        if not re.fullmatch(r"[1-9]\d{0,5}", value):
            raise InputError(f"{LOCAL_DEVICES}={shown(value)}: expected the number of devices of a process")
        return int(value)
    if os.environ.get(VARIABLE) != "auto" or "SLURM_GPUS_ON_NODE" not in os.environ:
        return None
    return int(os.environ["SLURM_GPUS_ON_NODE"]) // _tasks_on_node()


def versions() -> dict[str, str]:
    """Returns the versions, as text, that must be equal in all processes; for the library also its source."""
    return {
        "moe_jax": f"{moe_jax.__version__} (source {_digest_of_source()})",
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _parsed(value: str) -> Place:
    match = re.fullmatch(r"([^,\s]+:(\d{1,5})),(\d{1,6}),(\d{1,6})", value)
    if match is None or not 0 < int(match[2]) < 65536:
        raise InputError(f"{VARIABLE}={value}: expected auto, or HOST:PORT,PROCESSES,INDEX")
    count, index = int(match[3]), int(match[4])
    if not index < count:
        raise InputError(f"{VARIABLE}={value}: of {count} processes, which count from 0, there is no {index}")
    return Place(match[1], count, index)


def _detected() -> Place:
    """Finds the place as JAX does, except for the devices: JAX would give each process one GPU of a node."""
    from jax._src import clusters  # no public function returns these without starting JAX's distributed service

    try:
        address, count, index, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(waits()[0])
        )
    except Exception as error:
        raise InputError(f"{VARIABLE}=auto: {error}; HOST:PORT,PROCESSES,INDEX says it as well") from error
    if address is None or count is None or index is None:
        raise InputError(
            f"{VARIABLE}=auto: this is no TPU pod, Slurm, Open MPI or Kubernetes that JAX knows; say "
            "HOST:PORT,PROCESSES,INDEX"
        )
    if "SLURM_JOB_ID" in os.environ:
        devices = _devices_of_slurm()
    elif os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1":
        devices = None
    return Place(address, count, index, None if devices is None else tuple(devices))


def _devices_of_slurm() -> tuple[int, ...] | None:
    """Returns the share of this process in the GPUs of its node; None: all that it sees."""
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not on_node.isdecimal() or (visible and len(visible) != int(on_node)):
        return None  # with --gpus-per-task, Slurm shows every process its own alone
    tasks, total = _tasks_on_node(), int(on_node)
    if total % tasks:
        raise InputError(f"{tasks} processes on a node cannot share its {total} GPUs evenly")
    local, share = int(os.environ["SLURM_LOCALID"]), total // tasks
    return tuple(range(local * share, (local + 1) * share))


def _tasks_on_node() -> int:
    # Such as 2(x3),1: the nodes in their order.
    counts: list[int] = []
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or "1"
    for part in text.split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = int(os.environ.get("SLURM_NODEID", "0"))
    return max(1, counts[node] if node < len(counts) else 1)


def _digest_of_source() -> str:
    root = Path(moe_jax.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
