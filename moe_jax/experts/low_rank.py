"""DeRS-LM: a shared base plus a low-rank delta per expert, `W_i = W + A_i B_i` (METHODS 2.2, 3)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.bank import ExpertBank, Weights, add_stacked_biases, normal_kernel
from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.functional.dispatch import weighted_sum
from moe_jax.functional.ffn import hidden
from moe_jax.functional.linear import linear
from moe_jax.functional.routing import Routing


class LowRankDelta(nnx.Module):
    """`A` [E, in, r], kaiming uniform with a = sqrt(5) as LoRA draws it, and `B` [E, r, out], zero."""

    def __init__(self, num_experts: int, shape: tuple[int, int], rank: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.a = nnx.Param(draw_a(rngs.params(), num_experts, shape[0], rank).astype(dtype))
        self.b = nnx.Param(jnp.zeros((num_experts, rank, shape[1]), dtype))


def draw_a(key: Array, num_experts: int, fan_in: int, rank: int) -> Float[Array, "E i r"]:
    """Kaiming uniform with a = sqrt(5): uniform in ±1/sqrt(fan_in); float32."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, (num_experts, fan_in, rank), jnp.float32, -bound, bound)


class LowRankBank(ExpertBank):
    """`base` kernels [in, out] and `delta` factors. Applied factored: `W + AB` is never formed.

    The base products are computed once per token, for `x W_gate` and `x W_up` do not depend on the
    expert, and the experts' hidden states are combined before the down projection, which is linear.
    The deltas go through the factors of all experts side by side, `[in, E r]`, with the coefficients
    of experts that were not chosen set to zero: no token is permuted or exchanged.
    """

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts)
        assert config.rank is not None
        shapes = expert.shapes(d_model)
        self.base = nnx.Dict({name: Weights(normal_kernel(rngs, shape, dtype)) for name, shape in shapes.items()})
        self.delta = nnx.Dict(
            {
                name: LowRankDelta(num_experts, shape, config.rank, rngs=rngs, dtype=dtype)
                for name, shape in shapes.items()
            }
        )
        add_stacked_biases(self, d_model, dtype)

    def __call__(self, x: Float[Array, "T d"], routing: Routing) -> Float[Array, "T d"]:
        tokens, top_k = routing.experts.shape
        chosen = jax.nn.one_hot(routing.experts, self.num_experts, dtype=x.dtype)
        weights = routing.weights.astype(x.dtype)
        biases = {name: bias.astype(x.dtype) for name, bias in self.stacked_biases().items()}

        def masked(coefficients: Float[Array, "M e"], mask: Float[Array, "T k E"]) -> Float[Array, "T k e"]:
            """Zeroes the coefficients of experts that `mask` leaves out; M is T, or T k."""
            coefficients = coefficients.reshape(tokens, -1, self.num_experts, self.config.rank)
            return (coefficients * mask[..., None]).reshape(tokens, top_k, -1)

        def into_hidden(name: str) -> Float[Array, "T k f"]:
            a, b = self._side_by_side(name, x.dtype)
            y = linear(masked(linear(x, a), chosen), b) + linear(x, self.base[name].kernel[...])[:, None, :]
            return y + linear(chosen, biases[name]) if name in biases else y

        gate = into_hidden("gate") if self.expert.gated else None
        h = hidden(into_hidden("up"), gate, self.expert.activation)
        y = linear(weighted_sum(h, routing.weights), self.base["down"].kernel[...])
        a, b = self._side_by_side("down", x.dtype)
        weighted = chosen * weights[:, :, None]
        y = y + linear(jnp.sum(masked(linear(h.reshape(tokens * top_k, -1), a), weighted), axis=1), b)
        return y + linear(jnp.sum(weighted, axis=1), biases["down"]) if "down" in biases else y

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        return {name: self._kernel(name, expert) for name in self.expert.matrices}

    def _kernel(self, name: str, expert: int) -> Float[Array, "i o"]:
        base, delta = self.base[name].kernel[...], self.delta[name]
        a, b = delta.a[expert].astype(jnp.float32), delta.b[expert].astype(jnp.float32)
        return (base.astype(jnp.float32) + a @ b).astype(base.dtype)

    def _side_by_side(self, name: str, dtype: jnp.dtype) -> tuple[Float[Array, "i e"], Float[Array, "e o"]]:
        """`A` of all experts as columns of one matrix, `B` as rows of one; e = E r."""
        a, b = self.delta[name].a[...].astype(dtype), self.delta[name].b[...].astype(dtype)
        return jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2])
