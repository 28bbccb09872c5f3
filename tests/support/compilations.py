"""How often JAX compiles, for tests."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Yields a list that has an entry for every program that is compiled, or read from a cache, in the `with` block."""
    found: list[str] = []

    def hear(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
