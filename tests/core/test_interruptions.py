"""A signal ends a command wherever it arrives, even where Python drops the exception that it raises."""

import gc
import signal
import sys
import time
from collections.abc import Callable

import pytest

from moe_jax.core.interruptions import interruptions, number_of
from tests.support.tiers import one_in


class _InFinaliser:
    """An object whose finaliser a signal interrupts."""

    def __init__(self, number: int):
        self._number = number

    def __del__(self):
        signal.raise_signal(self._number)


def in_finaliser(number: int) -> None:
    interrupted = _InFinaliser(number)
    del interrupted


def in_garbage_collection(number: int) -> None:
    def callback(phase: str, info: dict) -> None:
        gc.callbacks.remove(callback)
        signal.raise_signal(number)

    gc.callbacks.append(callback)
    gc.collect()


@one_in(5)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("send", [in_finaliser, in_garbage_collection])
def test_a_signal_whose_exception_is_dropped_comes_again(name: str, send: Callable[[int], None], capsys):
    number, passed = getattr(signal, name), []
    before = signal.getsignal(number), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt) as interrupted, interruptions():
        send(number)
        passed.append("dropped")
        time.sleep(60)
    assert number_of(interrupted.value) == number and passed == ["dropped"]
    assert (signal.getsignal(number), sys.unraisablehook) == before and not capsys.readouterr().err


def test_a_command_that_ends_first_is_not_interrupted_afterwards():
    with interruptions():
        in_finaliser(signal.SIGINT)
    time.sleep(0.1)


def test_other_errors_that_are_dropped_are_still_told(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))

    class Broken:
        def __del__(self):
            raise ValueError("broken")

    with interruptions():
        Broken()
    assert told == [ValueError]
