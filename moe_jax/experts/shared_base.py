"""A shared base plus something small per expert, `W_i = W + Δ_i` (METHODS 2.2, 2.3, 3, 4)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.bank import ExpertBank, Weights, add_stacked_biases, normal_kernel
from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.experts.deltas import DELTAS
from moe_jax.experts.factored import Deltas, factored_ffn
from moe_jax.experts.parallel import SynthesisedKernels, apply_experts
from moe_jax.experts.strategy import choose_strategy
from moe_jax.functional.routing import Routing


class SharedBaseBank(ExpertBank):
    """`base` kernels [in, out] and a `delta` of one kind for each.

    Applied in one of two exact ways: *factored*, with the base products once per token, or *synthesised*, every
    kernel made tile by tile inside the grouped product. `experts.strategy` says which. No [E, in, out] array exists
    in either, forward or backward.
    """

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts)
        shapes = expert.shapes(d_model)
        self.base = nnx.Dict({name: Weights(normal_kernel(rngs, shape, dtype)) for name, shape in shapes.items()})
        self.delta = nnx.Dict(
            {
                name: DELTAS[config.kind](config, num_experts, shape, rngs=rngs, dtype=dtype)
                for name, shape in shapes.items()
            }
        )
        add_stacked_biases(self, d_model, dtype)

    def __call__(self, x: Float[Array, "T d"], routing: Routing) -> Float[Array, "T d"]:
        bases = {name: self.base[name].kernel[...] for name in self.expert.matrices}
        strategy = choose_strategy(self.config, self.expert, self.num_experts, *x.shape, routing.experts.shape[1])
        if strategy == "synthesised":
            kernels = {name: SynthesisedKernels(bases[name], self.delta[name]) for name in bases}
            return apply_experts(x, routing, kernels, self.stacked_biases(), self.expert.activation)
        deltas = {name: self._delta(name, bases[name].shape) for name in bases}
        how = strategy.removeprefix("factored-")
        return factored_ffn(x, routing, bases, deltas, self.stacked_biases(), self.expert.activation, how)

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        return {name: self._kernel(name, expert) for name in self.expert.matrices}

    def _kernel(self, name: str, expert: int) -> Float[Array, "i o"]:
        base, delta = self.base[name].kernel[...], self.delta[name]
        leaves = {leaf: array[expert] for leaf, array in (delta.trained() | delta.fixed()).items()}
        tile = delta.form(base.shape).tile(leaves, 0, base.shape[1])
        return (base.astype(jnp.float32) + tile).astype(base.dtype)

    def _delta(self, name: str, shape: tuple[int, int]) -> Deltas:
        delta = self.delta[name]
        return Deltas(delta.trained(), delta.fixed(), delta.form(shape))
