"""SIGTERM, SIGINT and SIGHUP as requests to stop after the current step."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax

from moe_jax.distributed import processes


class StopSignals:
    """Remembers that a signal arrived; a second one of the same kind has its usual effect. A context manager.

    Several processes agree on a step: a signal to one stops all. If a program other than `join_processes` has joined
    them, JAX's preemption service does that; it watches for SIGTERM, so other signals are passed on to it as SIGTERM.

    Args:
      notice: called, in a thread of its own, with the name of the first signal: a step may take long.

    Attributes:
      received: the signal, or None.
    """

    def __init__(self, notice: Callable[[str], object] = lambda name: None) -> None:
        self._notice = notice
        self.received: int | None = None
        self._passed_on = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            alone = jax.process_count() == 1 or processes.has_coordination()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if alone else (signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._previous[number] = signal.signal(number, self._remember if alone else self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop_after(self, step: int) -> bool:
        """Whether to save and stop after `step`. Every process calls this after every step; all get the same answer."""
        if jax.process_count() == 1:
            return self.received is not None
        if self.received is not None and not self._passed_on:
            self._passed_on = True
            processes.ask_all_to_stop(self.received)
        agreed = processes.stop_after(step)
        if agreed is not None:
            self.received = agreed
        return agreed is not None

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._previous[number])
        os.kill(os.getpid(), signal.SIGTERM)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._previous[number])
        # In another thread: the code that the signal interrupted may be printing.
        threading.Thread(target=self._notice, args=(signal.Signals(number).name,), daemon=True).start()
