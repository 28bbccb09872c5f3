"""Chooses the implementation of a product, in one place, by the platform that a program is lowered for."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from moe_jax.kernels.hardware import compute_capability, current_core, triton_fits

_deferred = Primitive("deferred")
_deferred.multiple_results = True


def deferred(
    function: Callable[..., PyTree[Array]],
    *arguments: PyTree[Array],
    out: PyTree[jax.ShapeDtypeStruct],
    divided: Callable[..., PyTree[Array]] | None = None,
    **options: Hashable,
) -> PyTree[Array]:
    """Returns `function(*arguments, **options)`; the function is traced when the program is lowered.

    The call can be batched, but has no derivative. The function does not see the context of the caller: the caller must
    find out what depends on the mesh in use, and pass it as an option.

    Args:
      function: programs are the same if the function and the options are equal.
      arguments: trees of arrays.
      out: shapes and dtypes of the result.
      divided: called, without the options, in place of the function if the compiler divides the program between several
        devices, as it cannot divide a kernel; or if an argument is empty, as of no tokens, of which a kernel has no
        tile. None: the function is no kernel, or is known to run on one device.
      options: further arguments.
    """
    arrays, structure = jax.tree.flatten(arguments)
    leaves, out_structure = jax.tree.flatten(out)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
    call = _Call(Bound(function, **options), structure)
    other = call if divided is None else _Call(divided, structure)
    if not all(array.size for array in arrays):
        call = other
    return jax.tree.unflatten(out_structure, _deferred.bind(*arrays, call=call, divided=other, shapes=shapes))


@dataclasses.dataclass(frozen=True, init=False)
class Bound:
    """A function with some of its options. Two with equal parts are equal, unlike two of `functools.partial`."""

    function: Callable[..., PyTree[Array]]
    options: tuple[tuple[str, Hashable], ...]

    def __init__(self, function: Callable[..., PyTree[Array]], **options: Hashable) -> None:
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "options", tuple(sorted(options.items())))

    def __call__(self, *arguments: PyTree[Array], **others: Hashable) -> PyTree[Array]:
        return self.function(*arguments, **dict(self.options), **others)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function of trees, with flat lists of arrays as arguments and result."""

    function: Callable[..., PyTree[Array]]
    structure: Any

    def __call__(self, *arrays: Array) -> list[Array]:
        return jax.tree.leaves(self.function(*jax.tree.unflatten(self.structure, arrays)))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function of arrays, mapped over some of their axes."""

    call: Callable[..., list[Array]]
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: Array) -> list[Array]:
        return jax.vmap(self.call, in_axes=self.axes)(*arrays)


@_deferred.def_abstract_eval
def _abstract(*_: Any, shapes: tuple, **calls: Callable[..., list[Array]]) -> list[ShapedArray]:
    del calls
    return [ShapedArray(shape, dtype) for shape, dtype in shapes]


def _traced(*arrays: Array, call: Callable[..., list[Array]], shapes: tuple) -> list[Array]:
    out = call(*arrays)
    made = tuple((array.shape, array.dtype) for array in out)
    assert made == shapes, f"{call} makes {made}, not {shapes}"
    return out


def _batched(arrays: Sequence[Array], axes: Sequence[int | None], **params: Any) -> tuple[list[Array], list[int]]:
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    shapes = tuple(((size, *shape), dtype) for shape, dtype in params["shapes"])
    calls = {name: _Mapped(params[name], tuple(axes)) for name in ("call", "divided")}
    out = _deferred.bind(*arrays, **calls, shapes=shapes)
    return out, [0] * len(out)


def _lowered(context: mlir.LoweringRuleContext, *arrays: Any, call: Any, divided: Any, shapes: tuple) -> Any:
    # The context has a number of devices only if the compiler divides the program; inside `shard_map` it has none.
    devices = getattr(context.module_context.axis_context, "num_devices", 1)
    chosen = call if devices == 1 else divided
    return mlir.lower_fun(_traced, multiple_results=True)(context, *arrays, call=chosen, shapes=shapes)


_deferred.def_impl(lambda *arrays, **params: jax.jit(partial(_deferred.bind, **params))(*arrays))
mlir.register_lowering(_deferred, _lowered)
batching.primitive_batchers[_deferred] = _batched


def one_device() -> bool:
    """Whether the function being traced runs on one device, or is the part of one inside `shard_map`.

    Only there can it call a kernel: the compiler cannot divide one between devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1 or all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types)


# Rematerialisation recognises a plain product by its primitive. Products of sorted rows, or with kernels that are
# unpacked or made on the way, are loops or a platform's own kernels and need a name.
PRODUCT = "kernel_product"


def by_platform(
    loops: Bound,
    dtype: DTypeLike,
    out: PyTree[jax.ShapeDtypeStruct],
    *,
    tpu: Bound | None = None,
    gpu: Bound | None = None,
) -> Callable[..., Any]:
    """Returns a function of arrays that becomes, when the program is lowered:

    - for a TPU, `tpu`, with the option `core`;
    - for an NVIDIA GPU for which Triton has products of the dtype, `gpu`, with the option `capability`;
    - otherwise, and wherever the compiler divides arrays between devices, `loops`: a kernel cannot be divided. Whether
      arrays are divided is known from the mesh in use, or without a mesh from the program, when it is lowered.

    Args:
      loops: plain XLA.
      dtype: of the factors of products.
      out: shapes and dtypes of the results.
      tpu, gpu: functions that call kernels, traced only if the program is lowered for their platform; None: there is
        none.
    """
    kernels: dict[str, Callable[..., Any]] = {}
    if one_device():
        capability = compute_capability()
        if tpu is not None:
            kernels["tpu"] = partial(deferred, tpu, out=out, divided=loops, core=current_core())
        if gpu is not None and triton_fits(dtype, capability):
            kernels["cuda"] = partial(deferred, gpu, out=out, divided=loops, capability=capability)
    choose: Any = partial(lax.platform_dependent, default=loops, **kernels)
    return choose if kernels else loops
