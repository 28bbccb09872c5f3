"""Asks for memory in huge pages, where Linux gives them only to programs that ask.

On a CPU, XLA asks the system for a program's temporary memory at every run, and gives it back afterwards. With pages
of 4 KiB a training step of a small MoE has hundreds of thousands of page faults; with huge pages, some hundred times
fewer. Nothing here imports JAX.
"""

import os
import sys
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LEAST_GLIBC = (2, 35)


def ask_for_huge_pages() -> None:
    """Starts this process anew with huge pages, if the system has them and the user set nothing about them.

    The C library reads its tunables only when a process starts, so the process is replaced by itself, with the same
    number, arguments and open files. To be called before anything else was done. To go without, set the variable
    `GLIBC_TUNABLES` to `glibc.malloc.hugetlb=0`.
    """
    given = os.environ.get(VARIABLE, "")
    if TUNABLE in given or not sys.executable or not _are_for_the_asking():
        return
    os.environ[VARIABLE] = ":".join(filter(None, (given, f"{TUNABLE}=1")))
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError:  # it goes without
        os.environ.pop(VARIABLE)
        if given:
            os.environ[VARIABLE] = given


def _are_for_the_asking() -> bool:
    """Whether Linux gives huge pages only to programs that ask, and the C library can ask."""
    try:
        library, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        is_new = tuple(map(int, version.split(".")[:2])) >= _LEAST_GLIBC
        return library == "glibc" and is_new and "[madvise]" in _POLICY.read_text()
    except (AttributeError, OSError, ValueError):  # another system
        return False
