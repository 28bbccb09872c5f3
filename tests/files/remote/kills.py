"""A command that is killed at one of its requests: that one is not made, nor any after it, not to clean up either."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from moe_jax.files import objects, remote_work


class Killed(BaseException):
    """In the place of SIGKILL."""


def killed_at(number: int, command: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a command that ends at its request of this number; returns whether it made so many."""
    made = 0
    main = threading.current_thread()
    lock = threading.Lock()

    def done(self: objects.Objects, name: str, start: Callable[[], Any], size: int = 0) -> Any:
        nonlocal made
        with lock:
            made += bool(name)  # opening a bucket is no request
            dead = made > number
        if dead:
            raise Killed if threading.current_thread() is main else OSError("killed")
        return real(self, name, start, size)

    real = objects.Objects._done
    with monkeypatch.context() as patch:
        patch.setattr(objects.Objects, "_done", done)
        try:
            command()
        except (Killed, OSError):
            return True
        finally:
            with lock:
                made = number + 1  # its threads are dead too
    return False


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever held a lease is dead."""
    monkeypatch.setattr(remote_work, "_owner_is_dead", lambda found: True)
