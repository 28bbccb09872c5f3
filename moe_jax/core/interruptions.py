"""Signals that end a command: Ctrl-C, SIGTERM and SIGHUP, none of which is lost wherever it arrives."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_AGAIN_AFTER = 0.05  # seconds: by then, what must not raise has mostly ended


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end; `number` says which. Open files are closed, as after Ctrl-C."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def number_of(interrupt: BaseException) -> int:
    """Returns the number of the signal that an interrupt is due to: SIGINT unless it says otherwise."""
    # By its attribute: run as `python -m`, a module may be there twice, and so a class of it.
    return getattr(interrupt, "number", signal.SIGINT)


@contextlib.contextmanager
def interruptions() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP interrupt the block as SIGINT does, and sees to it that each of the three does.

    Python drops an exception that is raised where none can be passed on: in a callback of the garbage collector, of
    which JAX has one, in that of a weak reference, in `__del__`. If it was an interrupt, the signal is sent again a
    little later, until it arrives somewhere else.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous, ended, usual = {}, threading.Event(), sys.unraisablehook
    main = threading.get_ident()

    def send_again(number: int) -> None:
        if not ended.wait(_AGAIN_AFTER):
            signal.pthread_kill(main, number)

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and not ended.is_set():
            threading.Thread(target=send_again, args=(number_of(unraisable.exc_value),), daemon=True).start()
        else:
            usual(unraisable)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            previous[number] = signal.signal(number, interrupt)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        ended.set()
        if sys.unraisablehook is hook:
            sys.unraisablehook = usual
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave_at_once(code: int) -> None:
    """Ends the program without the end of the interpreter, which waits for threads; those of XLA may not survive it."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
