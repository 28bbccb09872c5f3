"""Adapters as experts: in PESC after an FFN that all share, in PERFT beside an MoE (METHODS 6, 7)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.errors import InputError
from moe_jax.experts.bank import ExpertBank
from moe_jax.experts.config import AdapterConfig, BankConfig, FFNConfig
from moe_jax.experts.deltas import draw_a
from moe_jax.experts.linear import apply_ffn, ffn_linears
from moe_jax.experts.parallel import BATCH_AXES, axes_size
from moe_jax.functional.adapters import all_adapters, cheaper_way, routed_adapters
from moe_jax.functional.dropout import dropout
from moe_jax.functional.keys import fold_in
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
        num_adapters, _, rank = down.shape
        way = cheaper_way(num_adapters, rank, routing.experts.shape[1])
        apply = partial(routed_adapters, activation=config.activation, scale=config.scale, way=way)
        mesh = jax.sharding.get_abstract_mesh()
        if way == "side-by-side" or mesh.empty or mesh.size == 1:
            return apply(x, routing, down, up)
        tokens = P(BATCH_AXES if x.shape[0] % axes_size(mesh, *BATCH_AXES) == 0 else None, None)
        # Every device sorts its own tokens and has all adapters: left to the compiler, a sort gathers all tokens.
        return jax.shard_map(
            apply, in_specs=(tokens, Routing(tokens, tokens), P(), P()), out_specs=tokens, check_vma=False
        )(x, routing, down, up)


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
        self.base = nnx.Dict(ffn_linears(expert, d_model, bias=expert.bias, rngs=rngs, dtype=dtype))
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
