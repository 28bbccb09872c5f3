"""Memory that goes back to the system after a program was compiled."""

import ctypes
import sys
from types import SimpleNamespace

import jax
import pytest

from moe_jax.commands import memory_of_compiling
from moe_jax.commands.memory_of_compiling import return_memory_of_compiling


@pytest.fixture
def listeners(monkeypatch):
    """What asks to hear of programs."""
    found = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", found.append)
    return_memory_of_compiling.cache_clear()
    yield found
    return_memory_of_compiling.cache_clear()


def test_memory_is_given_back_after_programs_that_took_long(listeners, monkeypatch):
    trimmed = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trimmed.append))
    return_memory_of_compiling()
    return_memory_of_compiling()
    (listener,) = listeners
    for event, seconds in ((memory_of_compiling._MADE, 0.1), ("/jax/checkpoint/write", 60.0)):
        listener(event, seconds, fun_name="f")
    assert trimmed == []
    listener(memory_of_compiling._MADE, 2.0, fun_name="f")
    assert trimmed == [0]


def test_jax_tells_of_programs_by_this_name():
    heard = []

    def listener(event: str, seconds: float, **_: object) -> None:
        heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.jit(lambda x: x + 1).lower(1.0).compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert memory_of_compiling._MADE in heard


@pytest.mark.parametrize(("platform", "library"), [("darwin", None), ("linux", SimpleNamespace())])
def test_elsewhere_nothing_is_done(listeners, monkeypatch, platform, library):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return_memory_of_compiling()
    assert listeners == []
