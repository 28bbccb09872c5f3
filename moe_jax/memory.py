"""How much memory this machine has to spare."""

from pathlib import Path


def available_memory() -> int | None:
    """Bytes that can be used without swapping, as the kernel estimates them; None where it does not say (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(values["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in values else None
