"""Free memory of this machine, and the peak memory of this process."""

import contextlib
import resource
import sys
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that can be used without swapping, as Linux estimates them; None on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(values["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in values else None


def peak_memory_bytes() -> int:
    """Highest resident memory of this process so far."""
    with contextlib.suppress(OSError, StopIteration):
        # On Linux, where the figure below includes the memory of the parent process when it started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
