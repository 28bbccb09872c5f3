"""DeRS-SM: a shared base plus a sparse delta per expert, `W_i = W + scatter(I_i, V_i)` (METHODS 2.3)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.errors import InputError
from moe_jax.experts.bank import ExpertBank, Positions, Weights, add_stacked_biases, normal_kernel
from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.experts.parallel import apply_experts
from moe_jax.functional.routing import Routing


class SparseDelta(nnx.Module):
    """`positions` [E, n]: distinct flat places in a kernel, sorted, fixed; `values` [E, n]: zero at first."""

    def __init__(self, num_experts: int, shape: tuple[int, int], nonzeros: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.positions = Positions(draw_positions(rngs.params(), num_experts, math.prod(shape), nonzeros))
        self.values = nnx.Param(jnp.zeros((num_experts, nonzeros), dtype))


def draw_positions(key: Array, num_experts: int, size: int, nonzeros: int) -> Int[Array, "E n"]:
    """Distinct flat positions in [0, size) for every expert, sorted, int32.

    Raises:
      InputError: if a kernel has more entries than int32 can address.
    """
    if size > jnp.iinfo(jnp.int32).max:
        raise InputError(f"a kernel of {size} entries is too large for the int32 positions of a sparse delta")
    keys = jax.random.split(key, num_experts)
    # lax.map: one permutation of the whole kernel in memory, not E.
    return jax.lax.map(lambda k: jnp.sort(jax.random.permutation(k, size)[:nonzeros]).astype(jnp.int32), keys)


class SparseBank(ExpertBank):
    """`base` kernels [in, out] and `delta` positions and values."""

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts)
        shapes = expert.shapes(d_model)
        self.base = nnx.Dict({name: Weights(normal_kernel(rngs, shape, dtype)) for name, shape in shapes.items()})
        self.delta = nnx.Dict(
            {
                name: SparseDelta(num_experts, shape, config.nonzeros(shape), rngs=rngs, dtype=dtype)
                for name, shape in shapes.items()
            }
        )
        add_stacked_biases(self, d_model, dtype)

    def __call__(self, x: Float[Array, "T d"], routing: Routing) -> Float[Array, "T d"]:
        kernels = {name: self._stacked(name, x.dtype) for name in self.expert.matrices}
        return apply_experts(x, routing, kernels, self.stacked_biases(), self.expert.activation)

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        return {name: self._kernel(name, expert) for name in self.expert.matrices}

    def _kernel(self, name: str, expert: int) -> Float[Array, "i o"]:
        base, delta = self.base[name].kernel[...], self.delta[name]
        values = delta.values[expert].astype(base.dtype)
        flat = base.reshape(-1).at[delta.positions[expert]].add(values, unique_indices=True, indices_are_sorted=True)
        return flat.reshape(base.shape)

    def _stacked(self, name: str, dtype: jnp.dtype) -> Float[Array, "E i o"]:
        base, delta = self.base[name].kernel[...], self.delta[name]
        flat = base.astype(dtype).reshape(-1)
        values = delta.values[...].astype(dtype)

        def one(positions: Array, values: Array) -> Array:
            return flat.at[positions].add(values, unique_indices=True, indices_are_sorted=True)

        return jax.vmap(one)(delta.positions[...], values).reshape(self.num_experts, *base.shape)
