"""Keeps compiled programs on the disk, so that a command that is run again need not compile.

JAX keeps them where `JAX_COMPILATION_CACHE_DIR` says. Without it, commands set it to a folder under the user's cache.
Nothing here imports JAX.
"""

import hashlib
import os
import platform
import warnings
from pathlib import Path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
# By default JAX keeps only programs that took a second to compile. The many small ones of a command add up to as much.
LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
MOST_BYTES = 2_000_000_000


def keep_compiled_programs() -> Path | None:
    """Makes JAX keep compiled programs, if it is not imported yet; removes the oldest ones beyond `MOST_BYTES`.

    A folder that cannot be written is no error: then nothing is kept, as if `JAX_COMPILATION_CACHE_DIR` is set and
    empty. If it is set, nothing is changed.

    Returns:
      The folder; None if nothing was changed or no folder can be written.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        if not chosen:
            del os.environ[VARIABLE]
        return None
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_oldest(folder.parent)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    os.environ[VARIABLE] = str(folder)
    os.environ.setdefault(LEAST_SECONDS, "0")
    warnings.filterwarnings("ignore", message="Error (writing|reading) persistent compilation cache")
    return folder


def _folder() -> Path:
    """Returns the folder for this kind of machine: programs for a CPU with other instructions would not run here."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    try:
        described = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        described = []
    instructions = next((line for line in described if line.startswith(("flags", "Features"))), "")
    machine = hashlib.sha256(f"{platform.machine()} {platform.processor()} {instructions}".encode()).hexdigest()
    return cache / "moe_jax" / "compiled" / machine[:16]


def _remove_oldest(folder: Path) -> None:
    """Removes the programs unused for longest until the rest is small enough. Other commands may do so meanwhile."""
    found = []
    for file in folder.glob("*/*-cache"):
        try:
            found.append((file, file.stat()))
        except FileNotFoundError:
            continue
    total = sum(stat.st_size for _, stat in found)
    for file, stat in sorted(found, key=lambda entry: max(entry[1].st_atime, entry[1].st_mtime)):
        if total <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= stat.st_size
