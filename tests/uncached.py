"""Programs for chips that are not there are compiled anew: one that was compiled before cannot be loaded."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Programs that are compiled are neither looked for in JAX's persistent cache nor kept in it."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
