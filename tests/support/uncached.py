"""Programs for chips that are not there are compiled anew: one that was compiled before cannot be loaded."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Programs that are compiled are neither looked for in JAX's persistent cache nor kept in it."""
    before = jax.config.jax_enable_compilation_cache
    _enable(False)
    try:
        yield
    finally:
        _enable(before)


def _enable(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    # JAX asks once whether the cache is enabled.
    reset_cache()
