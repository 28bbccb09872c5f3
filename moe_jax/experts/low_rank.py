"""DeRS-LM: a shared base plus a low-rank delta per expert, `W_i = W + A_i B_i` (METHODS 2.2, 3)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.bank import ExpertBank, Weights, add_stacked_biases, normal_kernel
from moe_jax.experts.config import BankConfig, FFNConfig
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
        chosen = jax.nn.one_hot(routing.experts, self.num_experts, dtype=x.dtype)
        biases = {name: bias.astype(x.dtype) for name, bias in self.stacked_biases().items()}

        def into_hidden(name: str) -> Float[Array, "T k f"]:
            a, b = self._factors(name, x.dtype)
            coefficients = jnp.einsum("td,edr->ter", x, a)
            y = jnp.einsum("tke,ter,erf->tkf", chosen, coefficients, b, optimize=[(0, 1), (0, 1)])
            y = y + linear(x, self.base[name].kernel[...])[:, None, :]
            return y + jnp.einsum("tke,ef->tkf", chosen, biases[name]) if name in biases else y

        gate = into_hidden("gate") if self.expert.gated else None
        h = hidden(into_hidden("up"), gate, self.expert.activation)
        weights = routing.weights.astype(x.dtype)
        y = linear(jnp.einsum("tkf,tk->tf", h, weights), self.base["down"].kernel[...])
        a, b = self._factors("down", x.dtype)
        weighted = chosen * weights[:, :, None]
        coefficients = jnp.einsum("tker,tke->ter", jnp.einsum("tkf,efr->tker", h, a), weighted)
        y = y + jnp.einsum("ter,erd->td", coefficients, b)
        return y + jnp.einsum("tke,ed->td", weighted, biases["down"]) if "down" in biases else y

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        return {name: self._kernel(name, expert) for name in self.expert.matrices}

    def _kernel(self, name: str, expert: int) -> Float[Array, "i o"]:
        base = self.base[name].kernel[...]
        a, b = self._factors(name, jnp.float32)
        return (base.astype(jnp.float32) + a[expert] @ b[expert]).astype(base.dtype)

    def _factors(self, name: str, dtype: jnp.dtype) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
        delta = self.delta[name]
        return delta.a[...].astype(dtype), delta.b[...].astype(dtype)
