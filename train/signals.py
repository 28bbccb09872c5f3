"""SIGTERM, SIGINT and SIGHUP as requests to stop after the current step."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopSignals:
    """Remembers that a signal arrived; a second one of the same kind has its usual effect. A context manager.

    With several processes, JAX's preemption service watches for SIGTERM and gives all processes the same step to stop
    after; the other signals are passed on as this one.

    Args:
      notice: called, in a thread of its own, with the name of the first signal: a step may take long.

    Attributes:
      received: the signal, or None.
    """

    def __init__(self, notice: Callable[[str], object] = lambda name: None) -> None:
        self._notice = notice
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            alone = jax.process_count() == 1
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if alone else (signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._previous[number] = signal.signal(number, self._remember if alone else self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop_after(self, step: int) -> bool:
        """Whether to save and stop after `step`. Every process calls this after every step; all get the same answer."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM
        return self.received is not None

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._previous[number])
        os.kill(os.getpid(), signal.SIGTERM)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._previous[number])
        # Not here: what the signal interrupted may be printing.
        threading.Thread(target=self._notice, args=(signal.Signals(number).name,), daemon=True).start()
