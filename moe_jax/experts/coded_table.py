"""The embedding or the head of a decoder in codes: one kernel [d, V], of which a token is a column (methods.md 4)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.experts.devices import current_mesh
from moe_jax.experts.forms import KernelForm, Matrix
from moe_jax.experts.shapes import Arrays, Window


class CodedTable(NamedTuple):
    """The kernel, as an embedding and as a head use it.

    Attributes:
      form: its codes, or another form of a whole kernel.
      matrix: its shape, [d, V].
      arrays: its leaves, by their paths below the module: `coded/codes` and so on.
    """

    form: KernelForm
    matrix: Matrix
    arrays: Arrays

    def look_up(self, tokens: Int[Array, "..."]) -> Float[Array, "... d"]:
        """Returns the columns of some tokens, float32."""
        (width, vocabulary), flat = self.matrix.shape, tokens.reshape(-1)
        # Of what belongs to columns; row scales, tables and steps of scales belong to all of them.
        columns = {
            name: jnp.take(_whole_columns(one), flat, axis=1) if one.shape[-1] == vocabulary else one
            for name, one in self.arrays.items()
        }
        kernel = self.form.tile(None, columns, Window.all((width, flat.size)))
        return kernel.T.reshape(*tokens.shape, width)

    def logits(self, x: Float[Array, "... d"]) -> Float[Array, "... V"]:
        """Returns the product with the kernel, float32."""
        return self.form.apply(x.astype(jnp.float32), self.arrays, self.matrix, None)

    def kernel(self, dtype: jnp.dtype) -> Float[Array, "d V"]:
        """Returns the whole kernel, for a loss, which multiplies one chunk of tokens after another with it."""
        return self.form.materialise(None, self.arrays, self.matrix).astype(dtype)


def _whole_columns(array: Array) -> Array:
    """Gathers the array over `fsdp`, on a mesh, before columns are taken from it; see `layers.Embed`."""
    if current_mesh() is None:
        return array
    return jax.lax.with_sharding_constraint(array, P(None, "tensor"))
