"""The product of a linear map with a kernel of codes, over a mesh written by hand (`shard_map`).

Otherwise the compiler sends the kernel in float32, many times the size of its codes, between devices, tile after tile.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.experts.forms.matrix import Arrays, Matrix, Part
from moe_jax.experts.layout.mesh import BATCH_AXES, current_mesh, sequence_axis, splits_batch, token_axes

Multiply = Callable[[Array, dict[str, Array], Part | None], Array]
"""`multiply(x, arrays, part)`: x [..., i] -> [..., o]; `part` is what the arrays describe, None: the whole kernel."""


def sharded_product(
    x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, specs: Mapping[str, P], multiply: Multiply, *, unit: int
) -> Float[Array, "... o"]:
    """`x W`, in the dtype of `x`; on one device, or over a mesh with the part of the kernel that each device holds.

    Args:
      x: activations [T, i], or [B, ..., i].
      arrays: of the kernel, not stacked.
      matrix: the kernel.
      specs: how `tensor` splits each array.
      multiply: the product of one device.
      unit: rows whose codes fill whole bytes: a part begins with such a row.
    """
    mesh = current_mesh()
    if mesh is None:
        return multiply(x, dict(arrays), None)
    shards, (rows, columns) = mesh.shape["tensor"], matrix.shape
    # Whatever cannot be split so, every device multiplies with as a whole.
    is_split = shards > 1 and not (columns % shards if matrix.split == "out" else rows % (unit * shards))
    axis = "tensor" if is_split else None
    if x.ndim == 2:
        axes: list[Any] = [token_axes(mesh, x.shape[0])]
    else:
        rows_of_batch = BATCH_AXES if splits_batch(mesh, x.shape[0]) else None
        axes = [rows_of_batch, sequence_axis(mesh, x.shape[1]), *[None] * (x.ndim - 3)]
    array_specs = {name: specs[name] if is_split else P(*[None] * array.ndim) for name, array in arrays.items()}
    sums = is_split and matrix.split == "in"
    x_spec = P(*axes, axis if sums else None)
    y_spec = P(*axes, None if matrix.split == "in" else axis)

    def on_device(x: Array, arrays: dict[str, Array]) -> Array:
        y = multiply(x, arrays, part_here(matrix) if is_split else None)
        return lax.psum(y, "tensor") if sums else y

    # The loops over tiles carry values whose replication the checker cannot follow.
    return jax.shard_map(on_device, in_specs=(x_spec, array_specs), out_specs=y_spec, check_vma=False)(x, dict(arrays))


def part_here(matrix: Matrix) -> Part:
    """The part of a kernel that this device holds; inside `shard_map`."""
    shards, index = lax.axis_size("tensor"), lax.axis_index("tensor")
    fan_in, fan_out = matrix.shape
    if matrix.split == "in":
        return Part((fan_in // shards, fan_out), jnp.stack([index * (fan_in // shards), 0]))
    return Part((fan_in, fan_out // shards), jnp.stack([0, index * (fan_out // shards)]))
