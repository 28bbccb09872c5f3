"""Initial values of parameters, drawn on the device."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.draws import INIT_STD


def normal_kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """An initial kernel: normal with standard deviation 0.02."""
    return (INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


def uniform_factor(
    rngs: nnx.Rngs, stack: tuple[int, ...], fan_in: int, rank: int, dtype: jnp.dtype
) -> Float[Array, "... i r"]:
    """The factor `a` of a product `a b` as in LoRA: kaiming uniform with a = sqrt(5), which is ±1/sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(rngs.params(), (*stack, fan_in, rank), jnp.float32, -bound, bound).astype(dtype)
