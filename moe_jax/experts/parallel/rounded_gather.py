"""Parameters that devices gather after they are rounded, and whose gradients are summed in float32 and scattered."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from moe_jax.experts.layout.platforms import current_chip

# From so many devices on, a slice of TPUs has them along two sides at least.
_TWO_SIDES = 16


def gathered(array: Array, split: P, whole: P, dtype: DTypeLike) -> Array:
    """An array of which this device has a part: rounded, and then gathered. The gradient is summed in float32.

    Args:
      array: the part; inside `shard_map`.
      split: how it is split.
      whole: how what is returned is split: the same, or without the axes of one dimension.
      dtype: to which it is rounded if it is gathered.
    """
    if split == whole:
        return array
    axis = next(number for number, (one, other) in enumerate(zip(split, whole, strict=True)) if one != other)
    return _round_and_gather(array, axis, split[axis], jnp.dtype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _round_and_gather(array: Array, axis: int, along: str | tuple[str, ...], dtype: jnp.dtype) -> Array:
    return lax.all_gather(array.astype(dtype), along, axis=axis, tiled=True)


def _round_and_gather_forward(array: Array, axis: int, along: Any, dtype: jnp.dtype) -> tuple[Array, Array]:
    return _round_and_gather(array, axis, along, dtype), jnp.zeros((), array.dtype)


def _round_and_gather_backward(axis: int, along: Any, dtype: jnp.dtype, like: Array, cotangent: Array) -> tuple[Array]:
    # Of an array whose first axis is 1, the TPU compiler makes an all-reduce and a slice: twice as many bytes.
    leading = axis if set(cotangent.shape[:axis]) == {1} else 0
    whole = cotangent.reshape(cotangent.shape[leading:]).astype(jnp.float32)
    summed = scattered_sum(whole, along, axis - leading, in_two=current_chip().platform == "tpu")
    return (summed.reshape(*[1] * leading, *summed.shape).astype(like.dtype),)


_round_and_gather.defvjp(_round_and_gather_forward, _round_and_gather_backward)


def scattered_sum(array: Array, along: str | tuple[str, ...], axis: int, *, in_two: bool) -> Array:
    """The sum over all devices along mesh axes, of which each gets its part; see `lax.psum_scatter`.

    Args:
      array: of this device; inside `shard_map`.
      along: the mesh axes.
      axis: of the array, which is cut into parts.
      in_two: many devices do it in two steps, each along one side of the slice, first with those that are far from one
        another in the order of the mesh. The TPU compiler makes an all-reduce of one step over two sides.
    """
    size = lax.axis_size(along)
    side = math.isqrt(size)
    if not in_two or isinstance(along, tuple) or size < _TWO_SIDES or size & (size - 1):
        return lax.psum_scatter(array, along, scatter_dimension=axis, tiled=True)
    rows = 1 << (side.bit_length() - 1)
    columns = size // rows
    far = [[row * columns + column for row in range(rows)] for column in range(columns)]
    near = [[row * columns + column for column in range(columns)] for row in range(rows)]
    scatter = partial(lax.psum_scatter, axis_name=along, scatter_dimension=axis, tiled=True)
    return scatter(scatter(array, axis_index_groups=far), axis_index_groups=near)
