"""Processes that work for this one, and never outlive it."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any


@contextlib.contextmanager
def worker_pool(
    count: int, begin: Callable[..., object], arguments: Sequence[Any] = ()
) -> Iterator[concurrent.futures.Executor]:
    """Yields an executor of `count` processes, each of which first calls `begin(*arguments)`.

    The processes end with the `with` block: when it is done, or raises, which leaves their work unfinished; and when
    this process ends, however it does. They never see the Ctrl-C that a terminal sends to all of its processes.

    Everything that is submitted must be submitted from one thread, for each process starts when it is first needed.
    """
    # A fork would share the threads of the libraries that are loaded here.
    context = multiprocessing.get_context("spawn")
    end, kept = context.Pipe(duplex=False)
    executor = _Uninterrupted(count, context, _begin, (end, begin, arguments))
    with executor, end, kept:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
        executor.shutdown()


class _Uninterrupted(concurrent.futures.ProcessPoolExecutor):
    """Starts processes that have Ctrl-C blocked from their first instruction on."""

    def submit(self, *arguments: Any, **named: Any) -> concurrent.futures.Future[Any]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(*arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(end: Connection, begin: Callable[..., object], arguments: Sequence[Any]) -> None:
    threading.Thread(target=_leave, args=(end,), daemon=True).start()
    begin(*arguments)


def _leave(end: Connection) -> None:
    """Ends this process once the one that it works for closes its end of a pipe.

    The system closes it if that process ends in any other way, such as being killed.
    """
    end.poll(None)
    os._exit(1)
