"""Memory of this machine, and of this process."""

import contextlib
import resource
import sys
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that can be used without swapping, as Linux estimates them; None on other systems."""
    return _of_machine("MemAvailable")


def total_memory() -> int | None:
    """Bytes of memory of this machine; None on other systems than Linux."""
    return _of_machine("MemTotal")


def resident_memory() -> int | None:
    """Bytes of memory that this process has now; None on other systems than Linux."""
    return _of_process("VmRSS")


def peak_memory_bytes() -> int:
    """Highest resident memory of this process so far."""
    # On Linux, where the figure below includes the memory of the parent process when it started this one.
    highest = _of_process("VmHWM")
    if highest is not None:
        return highest
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def _of_machine(name: str) -> int | None:
    return _in_kib(Path("/proc/meminfo"), name)


def _of_process(name: str) -> int | None:
    return _in_kib(Path("/proc/self/status"), name)


def _in_kib(file: Path, name: str) -> int | None:
    """A line `NAME:  123 kB` of a file, in bytes; None: there is none."""
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in file.read_text().splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024
    return None
