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
from jaxtyping import Array, PyTree

_deferred = Primitive("deferred")
_deferred.multiple_results = True


def deferred(
    function: Callable[..., PyTree[Array]],
    *arguments: PyTree[Array],
    out: PyTree[jax.ShapeDtypeStruct],
    **options: Hashable,
) -> PyTree[Array]:
    """`function(*arguments, **options)`, which is traced when the program is lowered.

    It can be batched, but has no derivative. It does not see the context of the caller: what depends on the mesh in use
    is for the caller to find out, and to pass as an option.

    Args:
      function: programs are the same if it and the options are.
      arguments: trees of arrays.
      out: shapes and dtypes of the result.
      options: further arguments.
    """
    arrays, structure = jax.tree.flatten(arguments)
    leaves, out_structure = jax.tree.flatten(out)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
    call = _Call(function, tuple(sorted(options.items())), structure)
    return jax.tree.unflatten(out_structure, _deferred.bind(*arrays, call=call, shapes=shapes))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function of trees, as one of their leaves."""

    function: Callable[..., PyTree[Array]]
    options: tuple[tuple[str, Hashable], ...]
    structure: Any

    def __call__(self, *arrays: Array) -> list[Array]:
        arguments = jax.tree.unflatten(self.structure, arrays)
        return jax.tree.leaves(self.function(*arguments, **dict(self.options)))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function of arrays, mapped over axes of them."""

    call: Callable[..., list[Array]]
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: Array) -> list[Array]:
        return jax.vmap(self.call, in_axes=self.axes)(*arrays)


@_deferred.def_abstract_eval
def _abstract(*_: Any, call: Callable[..., list[Array]], shapes: tuple) -> list[ShapedArray]:
    del call
    return [ShapedArray(shape, dtype) for shape, dtype in shapes]


def _traced(*arrays: Array, call: Callable[..., list[Array]], shapes: tuple) -> list[Array]:
    out = call(*arrays)
    made = tuple((array.shape, array.dtype) for array in out)
    assert made == shapes, f"{call} makes {made}, not {shapes}"
    return out


def _batched(arrays: Sequence[Array], axes: Sequence[int | None], **params: Any) -> tuple[list[Array], list[int]]:
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    shapes = tuple(((size, *shape), dtype) for shape, dtype in params["shapes"])
    out = _deferred.bind(*arrays, call=_Mapped(params["call"], tuple(axes)), shapes=shapes)
    return out, [0] * len(out)


_deferred.def_impl(lambda *arrays, **params: jax.jit(partial(_deferred.bind, **params))(*arrays))
mlir.register_lowering(_deferred, mlir.lower_fun(_traced, multiple_results=True))
batching.primitive_batchers[_deferred] = _batched
