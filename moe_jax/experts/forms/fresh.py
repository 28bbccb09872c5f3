"""Initial values of parameters, drawn on the device, or only their shapes."""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.core.draws import INIT_STD

T = TypeVar("T")


class ShapesOnly(nnx.Rngs):
    """Random keys for a module of which only the shapes are wanted: what is drawn here is zeros instead.

    To trace the draws takes several times as long as to trace the rest of a model.
    """


def shapes_of(make: Callable[[nnx.Rngs], T]) -> T:
    """Returns what `make` returns, such as a module, with `ShapeDtypeStruct`s in place of its arrays."""
    return nnx.eval_shape(lambda: make(ShapesOnly(0)))


def normal_kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """An initial kernel: normal with standard deviation 0.02."""
    if isinstance(rngs, ShapesOnly):
        return jnp.zeros(shape, dtype)
    return (INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


def uniform_factor(
    rngs: nnx.Rngs, stack: tuple[int, ...], fan_in: int, rank: int, dtype: jnp.dtype
) -> Float[Array, "... i r"]:
    """The factor `a` of a product `a b` as in LoRA: kaiming uniform with a = sqrt(5), which is ±1/sqrt(fan_in)."""
    if isinstance(rngs, ShapesOnly):
        return jnp.zeros((*stack, fan_in, rank), dtype)
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(rngs.params(), (*stack, fan_in, rank), jnp.float32, -bound, bound).astype(dtype)
