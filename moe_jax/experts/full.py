"""Full experts: every expert has kernels of its own (vanilla upcycling, Mixtral, OLMoE)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.bank import ExpertBank, Weights, normal_kernel
from moe_jax.experts.config import BankConfig, FFNConfig, LoRAConfig
from moe_jax.experts.linear import LoRA, NF4Kernel, lora_for
from moe_jax.experts.parallel import FullKernels, Kernels, KernelsWithLoRA, NF4Kernels, apply_experts
from moe_jax.functional.nf4 import dequantize_nf4
from moe_jax.functional.routing import Routing


class StackedLinear(Weights):
    """Kernels [E, in, out], or their NF4 leaves, biases [E, out], and LoRA of every expert beside them."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        bias: bool,
        nf4: bool,
        lora: LoRAConfig | None,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        kernel = normal_kernel(rngs, shape, dtype)
        super().__init__(None if nf4 else kernel, jnp.zeros((shape[0], shape[2]), dtype) if bias else None)
        self.is_nf4, self.has_lora = nf4, lora is not None
        if nf4:
            self.nf4 = NF4Kernel(kernel)
        if lora is not None:
            self.lora = LoRA(lora, shape, rngs=rngs, dtype=dtype)

    def kernels(self, shape: tuple[int, int]) -> Kernels:
        """To be multiplied with."""
        plain = NF4Kernels(self.nf4.leaves(), shape) if self.is_nf4 else FullKernels(self.kernel[...])
        if not self.has_lora:
            return plain
        return KernelsWithLoRA(plain, self.lora.a[...], self.lora.b[...], self.lora.config.scale)

    def materialise(self, expert: int, shape: tuple[int, int]) -> Float[Array, "i o"]:
        """The kernel of one expert, LoRA included; float32 unless it is all there is."""
        if self.is_nf4:
            leaves = {name: leaf[expert] for name, leaf in self.nf4.leaves().items()}
            kernel = dequantize_nf4(leaves, shape[0], jnp.float32)
        else:
            kernel = self.kernel[expert]
        if not self.has_lora:
            return kernel
        a, b = (factor[expert].astype(jnp.float32) for factor in (self.lora.a, self.lora.b))
        return kernel.astype(jnp.float32) + self.lora.config.scale * (a @ b)


class FullBank(ExpertBank):
    """Kernels stacked over experts: `gate`, `up` [E, d, f] and `down` [E, f, d]."""

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts)
        self._d_model = d_model
        for name, shape in expert.shapes(d_model).items():
            lora = lora_for(expert.lora, name)
            linear = StackedLinear(
                (num_experts, *shape), bias=expert.bias, nf4=expert.nf4, lora=lora, rngs=rngs, dtype=dtype
            )
            setattr(self, name, linear)

    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        shapes = self.expert.shapes(self._d_model)
        kernels = {name: getattr(self, name).kernels(shape) for name, shape in shapes.items()}
        return apply_experts(x, routing, kernels, self.stacked_biases(), self.expert.activation)

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        shapes = self.expert.shapes(self._d_model)
        return {name: getattr(self, name).materialise(expert, shape) for name, shape in shapes.items()}
