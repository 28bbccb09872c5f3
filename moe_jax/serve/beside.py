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
        """Whether a piece of work was begun, and has been done without an error."""
        future = self._work.get(key)
        return future is not None and future.done() and future.exception() is None

    def error(self, key: Hashable) -> BaseException | None:
        """Returns what a piece of work raised; None: nothing, or it is not done."""
        future = self._work.get(key)
        return future.exception() if future is not None and future.done() else None

    def forget(self, key: Hashable) -> None:
        """Has a piece of work that came to nothing be begun again."""
        self._work.pop(key, None)

    def forget_errors(self) -> None:
        """Has all that raised an error be begun again."""
        for key in [key for key in self._work if self.error(key) is not None]:
            self.forget(key)

    def close(self, seconds: float | None = None) -> bool:
        """Ends the thread; what has not begun never does.

        Returns whether what has begun was done within so many seconds; None: waits for it.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        begun = [future for future in self._work.values() if not future.done()]
        return not concurrent.futures.wait(begun, seconds).not_done
