"""Which implementation of a product a program gets: decided in one place, for the platform that it is lowered for."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moe_jax.kernels.deferred import deferred
from moe_jax.kernels.gpu.nvidia import compute_capability, triton_fits
from moe_jax.kernels.one_device import one_device
from moe_jax.kernels.tpu.chip import current_core


class Kernel(NamedTuple):
    """A function that calls kernels; it is traced only if the program is lowered for its platform.

    Attributes:
      function: is called with arrays, the options, and what its platform adds to them.
      options: hashable, by name.
    """

    function: Callable[..., Any]
    options: Mapping[str, Hashable]


def by_platform(
    loops: Callable[..., Any],
    dtype: DTypeLike,
    out: PyTree[jax.ShapeDtypeStruct],
    *,
    tpu: Kernel | None = None,
    gpu: Kernel | None = None,
) -> Callable[..., Any]:
    """A function of arrays that is, when the program is lowered:

    - for a TPU, `tpu`, with the option `core`;
    - for an NVIDIA GPU that Triton has products of the dtype for, `gpu`, with the option `capability`;
    - otherwise `loops`. So it is, too, where the compiler divides arrays between devices, as it cannot do with a
      kernel.

    Args:
      loops: plain XLA.
      dtype: of the factors of products.
      out: shapes and dtypes of the results.
      tpu, gpu: kernels; None: there is none.
    """
    kernels: dict[str, Callable[..., Any]] = {}
    if one_device():
        capability = compute_capability()
        if tpu is not None:
            kernels["tpu"] = partial(deferred, tpu.function, out=out, core=current_core(), **tpu.options)
        if gpu is not None and triton_fits(dtype, capability):
            kernels["cuda"] = partial(deferred, gpu.function, out=out, capability=capability, **gpu.options)
    choose: Any = partial(lax.platform_dependent, default=loops, **kernels)
    return choose if kernels else loops
