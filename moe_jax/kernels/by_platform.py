"""Chooses the implementation of a product, in one place, by the platform that a program is lowered for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moe_jax.kernels.deferred import Bound, deferred
from moe_jax.kernels.gpu.nvidia import compute_capability, triton_fits
from moe_jax.kernels.tpu.chip import current_core


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
