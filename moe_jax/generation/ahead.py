"""Programs that are compiled before they are called, in another thread, while others run."""

import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any

import jax


class Ahead:
    """A jitted function, some of whose programs were compiled ahead, as `jit` itself cannot be told to.

    Arguments are given by name. What is not compiled ahead is compiled when it is called first.

    Args:
      function: what `jax.jit` returned.
      static: static arguments, and `state`: other ones, that are the same in all calls.
    """

    def __init__(self, function: Any, static: Mapping[str, Hashable] | None = None, **state: Any):
        self._function, self._static, self._state = function, static or {}, state
        self._compiled: dict[Hashable, Future[Callable[..., Any]]] = {}
        self._called: set[Hashable] = set()
        self._guard = threading.Lock()

    def compile(self, *, static: Mapping[str, Hashable] | None = None, **arrays: Any) -> None:
        """Compiles the program for arrays, or `jax.ShapeDtypeStruct`s, unless it is there; nothing runs."""
        static = static or {}
        key = _key(static, arrays)
        with self._guard:
            if key in self._called or key in self._compiled:
                return
            self._compiled[key] = future = Future()
        try:
            lowered = self._function.lower(**self._static, **static, **self._state, **arrays)
            future.set_result(lowered.compile())
        except BaseException as error:
            future.set_exception(error)
            raise

    def __call__(self, *, static: Mapping[str, Hashable] | None = None, **arrays: Any) -> Any:
        """Returns what the function returns; waits for a program that is being compiled."""
        static = static or {}
        key = _key(static, arrays)
        with self._guard:
            future = self._compiled.get(key)
            if future is None:
                self._called.add(key)
        if future is not None:
            return future.result()(**self._state, **arrays)
        return self._function(**self._static, **static, **self._state, **arrays)


def _key(static: Mapping[str, Hashable], arrays: Mapping[str, Any]) -> Hashable:
    return tuple(static.values()), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arrays))
