"""Functions that are traced only if the program is lowered with them.

`lax.platform_dependent` traces the branches of all platforms, though a program is mostly lowered for one. A kernel
takes some tenths of a second to import and to trace, which a program for another platform should not pay.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

_deferred = Primitive("deferred")


def deferred(function: Callable[..., Array], *arrays: Array, out: jax.ShapeDtypeStruct, **options: Hashable) -> Array:
    """`function(*arrays, **options)`, which is traced when the program is lowered.

    It can be batched, but has no derivative. It does not see the context of the caller: what depends on the mesh in use
    is for the caller to find out, and to pass as an option.

    Args:
      function: returns one array. Programs are the same if the function and the options are.
      arrays: its arguments.
      out: shape and dtype of the result.
      options: further arguments.
    """
    static = tuple(sorted(options.items()))
    return _deferred.bind(*arrays, function=function, options=static, shape=tuple(out.shape), dtype=out.dtype)


@_deferred.def_abstract_eval
def _abstract(*_: Any, function: Callable[..., Array], options: tuple, shape: tuple[int, ...], dtype: Any) -> Any:
    del function, options
    return ShapedArray(shape, dtype)


def _traced(
    *arrays: Array, function: Callable[..., Array], options: tuple, shape: tuple[int, ...], dtype: Any
) -> Array:
    out = function(*arrays, **dict(options))
    assert (out.shape, out.dtype) == (shape, dtype), (function, out.shape, out.dtype, shape, dtype)
    return out


def _batched(arrays: Sequence[Array], dims: Sequence[Any], **params: Any) -> tuple[Array, int]:
    size = next(array.shape[dim] for array, dim in zip(arrays, dims, strict=True) if dim is not None)
    function = _Mapped(params["function"], params["options"], tuple(dims))
    return _deferred.bind(*arrays, **(params | dict(function=function, options=(), shape=(size, *params["shape"])))), 0


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function with its options, mapped over axes of its arguments."""

    function: Callable[..., Array]
    options: tuple
    dims: tuple[int | None, ...]

    def __call__(self, *arrays: Array) -> Array:
        return jax.vmap(partial(self.function, **dict(self.options)), in_axes=self.dims)(*arrays)


_deferred.def_impl(lambda *arrays, **params: jax.jit(partial(_deferred.bind, **params))(*arrays))
mlir.register_lowering(_deferred, mlir.lower_fun(_traced, multiple_results=False))
batching.primitive_batchers[_deferred] = _batched
