"""Work that is done beside what goes on: a program is compiled while others answer requests."""

import concurrent.futures
from collections.abc import Callable, Hashable


class Beside:
    """Does pieces of work, each under a key, in a thread of its own, in the order in which they were begun.

    `on_done` is called in that thread after each of them.
    """

    def __init__(self, on_done: Callable[[], object]):
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="moe-jax-beside")
        self._work: dict[Hashable, concurrent.futures.Future[object]] = {}
        self._on_done = on_done

    def has(self, key: Hashable) -> bool:
        """Whether a piece of work was begun."""
        return key in self._work

    def begin(self, key: Hashable, work: Callable[[], object]) -> None:
        """Begins a piece of work."""
        self._work[key] = future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._on_done())

    @property
    def is_idle(self) -> bool:
        """Whether all that was begun is done."""
        return all(future.done() for future in self._work.values())

    def is_done(self, key: Hashable) -> bool:
        """Whether a piece of work was begun and is done; raises what it raised."""
        future = self._work.get(key)
        if future is None or not future.done():
            return False
        future.result()
        return True

    def forget(self, key: Hashable) -> None:
        """Has a piece of work that came to nothing be begun again."""
        self._work.pop(key, None)

    def close(self, seconds: float | None = None) -> bool:
        """Ends the thread; what has not begun never does.

        Returns whether what has begun was done within so many seconds; None: waits for it.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        begun = [future for future in self._work.values() if not future.done()]
        return not concurrent.futures.wait(begun, seconds).not_done
