"""Adapters as experts: in PESC after an FFN that all share, in PERFT beside an MoE (METHODS 6, 7)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.errors import InputError
from moe_jax.experts.bank import ExpertBank
from moe_jax.experts.config import AdapterConfig, BankConfig, FFNConfig
from moe_jax.experts.deltas import draw_a
from moe_jax.experts.linear import Linear, apply_ffn, lora_for, split_of
from moe_jax.experts.parallel import BATCH_AXES
from moe_jax.functional.adapters import all_adapters, routed_adapters
from moe_jax.functional.keys import dropout, fold_in
from moe_jax.functional.routing import Routing


class Adapters(nnx.Module):
    """M adapters: `down` [M, d, r], drawn as LoRA's A, and `up` [M, r, d], zero at first, so that they add nothing."""

    def __init__(self, config: AdapterConfig, num_adapters: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        self.down = nnx.Param(draw_a(rngs.params(), num_adapters, d_model, config.rank).astype(dtype))
        self.up = nnx.Param(jnp.zeros((num_adapters, config.rank, d_model), dtype))

    def __call__(
        self, x: Float[Array, "T d"], routing: Routing | None, key: Array | None = None
    ) -> Float[Array, "T d"]:
        """The weighted sum of the chosen adapters; without a routing all of them with weight 1.

        Args:
          x: tokens.
          routing: chosen adapters and weights.
          key: for dropout in training.
        """
        x, config = dropout(x, self.config.dropout, key), self.config
        down, up = self.down[...], self.up[...]
        if routing is None:
            return all_adapters(x, down, up, config.activation, config.scale)
        return routed_adapters(x, routing, down, up, config.activation, config.scale, batch_axes=BATCH_AXES)


class AdapterBank(ExpertBank):
    """PESC: `y = sum_i w_i (h + s act(h Down_i) Up_i)` with `h = FFN(x)`, computed once (Wu et al. 2024, section 3).

    The weights sum to 1, which the config of the layer makes sure of: `h` therefore counts once, and before training
    the layer is its FFN to the last bit.
    """

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts)
        assert config.adapter is not None
        linears = {}
        for name, shape in expert.shapes(d_model).items():
            how = {"bias": expert.bias, "nf4": expert.nf4, "lora": lora_for(expert.lora, name), "split": split_of(name)}
            linears[name] = Linear(shape, **how, rngs=rngs, dtype=dtype)
        self.base = nnx.Dict(linears)
        self.adapters = Adapters(config.adapter, num_experts, d_model, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        linears = {name: self.base[name] for name in self.expert.matrices}
        h = apply_ffn(linears, x, self.expert.activation, fold_in(key, 0))
        return h + self.adapters(h, routing, fold_in(key, 1))

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        raise InputError("adapter experts come after an FFN and have no kernels that could stand in its place")

    def stacked_biases(self) -> dict[str, Float[Array, "E o"]]:
        """None: the FFN has one bias per matrix, which all experts share."""
        return {}
