"""Memory that XLA took to make a program goes back to the system: a process otherwise keeps it to its end."""

import ctypes
import sys
from functools import cache

import jax

# JAX tells this of programs that were compiled, and of those that came from the folder of compiled programs.
_MADE = "/jax/core/compile/backend_compile_duration"
_LEAST_SECONDS = 0.5


@cache  # one listener is enough
def return_memory_of_compiling() -> None:
    """From now on, memory that is free goes back to the system after every program that took long to make.

    The C library keeps freed memory for later. What XLA's compiler freed, or JAX when it read a large program from its
    folder, is hundreds of megabytes, of which a process that then only runs the program needs nothing. To look through
    the free memory takes some hundredths of a second. Where the C library is another one than glibc, nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: the libraries of this process
    if trim is None:
        return

    def after(event: str, duration_secs: float, **_: object) -> None:
        if event == _MADE and duration_secs >= _LEAST_SECONDS:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(after)
