"""The environment that JAX finds: memory in huge pages, a folder for compiled programs, no search for an absent TPU.

And what the system may lack that all programs count on: standard streams.

Nothing here imports JAX, and everything has to be called before somebody else does.
"""

import hashlib
import importlib.util
import io
import os
import platform
import sys
import warnings
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LEAST_GLIBC = (2, 35)


def ask_for_huge_pages() -> None:
    """Starts this process anew with huge pages, if Linux gives them to programs that ask and the user set nothing.

    On a CPU, XLA asks the system for a program's temporary memory at every run, and gives it back afterwards. With
    pages of 4 KiB a training step of a small MoE has hundreds of thousands of page faults; with huge pages, some
    hundred times fewer.

    The C library reads its tunables only when a process starts, so the process is replaced by itself, with the same
    number, arguments and open files. To be called before anything else was done. To go without, set the variable
    `GLIBC_TUNABLES` to `glibc.malloc.hugetlb=0`.
    """
    given = os.environ.get(TUNABLES, "")
    if TUNABLE in given or not sys.executable or not _are_for_the_asking():
        return
    os.environ[TUNABLES] = ":".join(filter(None, (given, f"{TUNABLE}=1")))
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError:  # it goes without
        os.environ.pop(TUNABLES)
        if given:
            os.environ[TUNABLES] = given


def _are_for_the_asking() -> bool:
    """Whether Linux gives huge pages only to programs that ask, and the C library can ask."""
    try:
        library, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        is_new = tuple(map(int, version.split(".")[:2])) >= _LEAST_GLIBC
        return library == "glibc" and is_new and "[madvise]" in _POLICY.read_text("ascii")
    except (AttributeError, OSError, ValueError):  # another system
        return False


def open_standard_streams() -> None:
    """Opens those of the three standard streams that are closed, on nothing; and prints any text in any encoding.

    The next file that is opened would otherwise take the number of one, and get what libraries print. Characters that
    the encoding of standard output does not have, as where the locale is no UTF-8 one, are printed as escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and "utf" not in sys.stdout.encoding.lower():
        sys.stdout.reconfigure(errors="backslashreplace")  # as that of errors is


imported: list[str] = []
"""Modules of the user's that `--import` named for the running command; to be named again when it is given again."""

_OF_NUMBERS = ("JAX_ENABLE_X64", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")


def ignore_settings_of_numbers() -> None:
    """Removes variables that change the numbers of every JAX program: Optax and OTT fail with some of their values."""
    for name in _OF_NUMBERS:
        os.environ.pop(name, None)


CACHE_FOLDER = "JAX_COMPILATION_CACHE_DIR"
# By default JAX keeps only programs that took a second to compile. The many small ones of a command add up to as much.
LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
MOST_BYTES = 2_000_000_000


def keep_compiled_programs() -> Path | None:
    """Makes JAX keep compiled programs under the user's cache; removes the oldest ones beyond `MOST_BYTES`.

    If `JAX_COMPILATION_CACHE_DIR` is set, nothing is changed; set and empty, nothing is kept. A folder that cannot be
    written is no error: then nothing is kept either.

    Returns:
      The folder; None if nothing was changed or no folder can be written.
    """
    chosen = os.environ.get(CACHE_FOLDER)
    if chosen is not None:
        if not chosen:
            del os.environ[CACHE_FOLDER]
        return None
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_oldest(folder.parent)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    os.environ[CACHE_FOLDER] = str(folder)
    os.environ.setdefault(LEAST_SECONDS, "0")
    warnings.filterwarnings("ignore", message="Error (writing|reading) persistent compilation cache")
    return folder


def _folder() -> Path:
    """Returns the folder for this kind of machine: programs for a CPU with other instructions would not run here."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    try:
        described = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        described = []
    instructions = next((line for line in described if line.startswith(("flags", "Features"))), "")
    # Not `platform.processor()`: that runs a program.
    machine = hashlib.sha256(f"{platform.machine()} {instructions}".encode()).hexdigest()
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


def avoid_absent_tpu() -> None:
    """Keeps JAX from looking for a TPU on a machine without one.

    libtpu is also installed for its compiler alone (the test extra does so). JAX then tries to start a TPU, and libtpu
    prints a page of warnings before JAX falls back. A TPU appears as /dev/accel* or /dev/vfio/*. If there is one, or a
    GPU, or the user chose a platform, nothing is changed.
    """
    chosen = bool(os.environ.get("JAX_PLATFORMS"))
    accelerator = any(any(Path("/dev").glob(device)) for device in ("accel*", "vfio/*", "nvidia*", "kfd", "dxg"))
    if not chosen and not accelerator and importlib.util.find_spec("libtpu") is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
