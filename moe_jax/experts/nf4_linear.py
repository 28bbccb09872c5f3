"""A linear map with an NF4 kernel, on one device or over a mesh.

Over a mesh it is written by hand (`shard_map`): what the compiler sends between devices otherwise is the kernel in
float32, eight times its codes, tile after tile.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.experts.parallel import BATCH_AXES, axes_size
from moe_jax.functional.nf4 import Leaves, nf4_matmul


def nf4_linear(
    x: Float[Array, "... i"], leaves: Leaves, rows: int, split: Literal["in", "out"]
) -> Float[Array, "... o"]:
    """`x W` with W in NF4, in the dtype of `x`; see `functional.nf4.nf4_matmul`.

    Args:
      x: activations [B, ..., i].
      leaves: of one kernel, as `quantize_nf4` gives them.
      rows: i.
      split: the axis of the kernel that `tensor` splits.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return nf4_matmul(x, leaves, rows)
    shards, columns = mesh.shape["tensor"], leaves["codes"].shape[1]
    # A shard begins with a whole byte. Whatever cannot be split so, every device multiplies with as a whole.
    if (columns % shards if split == "out" else rows % (2 * shards)) or shards == 1:
        axis = None
    else:
        axis = "tensor"
    first = BATCH_AXES if x.shape[0] % axes_size(mesh, *BATCH_AXES) == 0 else None
    inner = (None,) * (x.ndim - 2)
    specs = {name: P(*[None] * leaf.ndim) for name, leaf in leaves.items()}
    if split == "in":
        specs |= {"codes": P(axis, None)}
        x_spec, y_spec = P(first, *inner, axis), P(first, *inner, None)
    else:
        specs |= {name: P(None, axis) for name in ("codes", "scale_codes")}
        x_spec, y_spec = P(first, *inner, None), P(first, *inner, axis)
    multiply = partial(_local, rows=rows, columns=columns, split=split) if axis else partial(nf4_matmul, rows=rows)
    # The loops over tiles carry values whose replication the checker cannot follow.
    return jax.shard_map(multiply, in_specs=(x_spec, specs), out_specs=y_spec, check_vma=False)(x, leaves)


def _local(x: Array, leaves: Leaves, *, rows: int, columns: int, split: str) -> Array:
    """The product with what one device has of the kernel."""
    shards, index = lax.axis_size("tensor"), lax.axis_index("tensor")
    if split == "in":
        origin = jnp.stack([index * (rows // shards), 0])
        return lax.psum(nf4_matmul(x, leaves | {"origin": origin}, rows // shards, columns), "tensor")
    origin = jnp.stack([0, index * (columns // shards)])
    return nf4_matmul(x, leaves | {"origin": origin}, rows, columns)
