"""Work on two experts at a time: one is read while the other is worked on."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items; each is made in a thread of its own while the caller works on the one before.

    Memory holds one item more. JAX's settings of the calling thread (`jax.default_matmul_precision` and the like) are
    not those of the other: items are to be read, or made by NumPy, which lets go of the interpreter in what takes time.

    Args:
      items: what raises there, raises here.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, iterator, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, iterator, _END)
            yield item
