"""Work of NumPy on several cores; NumPy releases the interpreter's lock in long operations.

JAX's settings of a thread (`jax.default_matmul_precision` and the like) do not apply to the threads made here.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
