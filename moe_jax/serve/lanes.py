"""Threads for what takes long, away from the event loop, in which all requests are answered."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """Calls functions in one thread, one after another. Who waits and is cancelled leaves no trace."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="moe-jax-lane")
        self._free = asyncio.Semaphore(1)

    async def run(self, function: Callable[[], T]) -> T:
        """Returns what a function returns; raises what it raises."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future = self._pool.submit(function)
        # Not when this call ends: a thread goes on when nobody waits for it any more.
        future.add_done_callback(lambda _: _soon(loop, self._free.release))
        return await asyncio.wrap_future(future)


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)
