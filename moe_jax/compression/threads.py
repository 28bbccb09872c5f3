"""Work of NumPy and SciPy on several cores; they release the interpreter's lock in long operations.

JAX's settings of a thread (`jax.default_matmul_precision` and the like) do not apply to the threads made here.
"""

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")
R = TypeVar("R")
# NumPy's operations wait for memory, whose bandwidth a few cores use up; and each thread has arrays of its own.
_MOST = 8


def in_threads(work: Callable[[T], R], items: Iterable[T], *, most: int = _MOST) -> list[R]:
    """Returns the results of `work` for all items, in their order, with a thread for every core, but `most` at most.

    `work` writes nothing that it reads for another item; its errors are raised here. All items are taken at once.
    """
    with ThreadPoolExecutor(min(most, os.cpu_count() or 1)) as threads:
        return list(threads.map(work, items))


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yields the same items; each is made in a thread while the caller works on the one before.

    Memory holds one item more. Errors in making them are raised here.
    """
    iterator = iter(items)

    def some() -> list[T]:
        """The next item, or none."""
        return list(itertools.islice(iterator, 1))

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(some)
        while found := coming.result():
            coming = thread.submit(some)
            yield from found


# A decomposition of a matrix of this size takes some seconds on one core.
_SMALL = 2048


class _OneThread(contextlib.AbstractContextManager[None]):
    """Sets the BLAS libraries of this process to one thread while any of our own threads is inside."""

    def __init__(self) -> None:
        self._lock, self._inside, self._limits = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._limits.enter_context(_libraries().limit(limits=1, user_api="blas"))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._limits.close()


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


_one_thread = _OneThread()


def decomposing(size: int) -> contextlib.AbstractContextManager[None]:
    """A context in which matrices of this size are decomposed: small ones by one thread of BLAS.

    Its threads wait for each other after every small step of a decomposition. Where something else has a turn on a
    core, such as a second matrix or another program, all of them wait for that, many times (measured).
    """
    return _one_thread if size <= _SMALL else contextlib.nullcontext()
