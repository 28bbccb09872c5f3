"""Full experts: every expert has kernels of its own (vanilla upcycling, Mixtral, OLMoE)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.bank import ExpertBank, Weights, normal_kernel
from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.experts.parallel import FullKernels, apply_experts
from moe_jax.functional.routing import Routing


class FullBank(ExpertBank):
    """Kernels stacked over experts: `gate`, `up` [E, d, f] and `down` [E, f, d]."""

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts)
        for name, shape in expert.shapes(d_model).items():
            bias = jnp.zeros((num_experts, shape[1]), dtype) if expert.bias else None
            setattr(self, name, Weights(normal_kernel(rngs, (num_experts, *shape), dtype), bias))

    def __call__(self, x: Float[Array, "T d"], routing: Routing) -> Float[Array, "T d"]:
        kernels = {name: FullKernels(getattr(self, name).kernel[...]) for name in self.expert.matrices}
        return apply_experts(x, routing, kernels, self.stacked_biases(), self.expert.activation)

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        return {name: getattr(self, name).kernel[expert] for name in self.expert.matrices}
