"""The Mixture-of-Experts module: a router, a bank of experts, and perhaps a universal FFN and PEFT experts."""

import math

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from moe_jax.experts.adapters import Adapters
from moe_jax.experts.kernel_bank import make_bank
from moe_jax.experts.variables import Fixed
from moe_jax.functional import keys
from moe_jax.functional.routing import (
    NO_EXPERT,
    RouterStats,
    Routing,
    Selection,
    add_choice,
    add_weighted,
    check_shape,
    route,
    universal_weight,
)
from moe_jax.models.config import MoEConfig, PerftConfig
from moe_jax.nn.layers import FFN
from moe_jax.nn.router import CoderRouter, LinearRouter, router_losses


class Perft(nnx.Module):
    """Adapters on the MoE's input, whose sum is added to the MoE's output.

    Adapters of the variant `routed` are weighted by a router of their own, which the gradient of the task reaches
    through these weights; those of `embedded` by the MoE's router; those of `dense` and `single` have no weights.
    """

    def __init__(self, config: PerftConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        if config.variant == "routed":
            self.router = LinearRouter(d_model, config.num_experts, rngs=rngs, dtype=dtype)
        self.adapters = Adapters(config.adapter, config.num_experts, d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T d"], moe: Routing, valid: Bool[Array, " T"] | None, key: Array | None
    ) -> tuple[Float[Array, "T d"], tuple[RouterStats, ...]]:
        """Returns the term that is added to the MoE's output, and the statistics of the adapters' own router, if any.

        Args:
          x: the MoE's input.
          moe: the decision of the MoE's router, in terms of the router's outputs.
          valid: tokens that are not padding; None: all.
          key: for dropout in training.
        """
        if self.config.variant == "embedded":
            return self.adapters(x, moe, key), ()
        if self.config.variant != "routed":
            return self.adapters(x, None, key), ()
        assert self.config.top_k is not None
        routing, stats = route(self.router(x), self.config.top_k, self.config.gate, valid=valid)
        return self.adapters(x, routing, key), (stats,)


class MoE(nnx.Module):
    """Routes every token to `top_k` experts of a bank, and to the universal FFN if there is one (methods.md 2.4).

    The universal FFN stands beside the bank, or with `extended` is the bank's last expert. With merged experts, the
    bank holds fewer experts than the router has outputs, and `groups` int32[E] has the expert of each output. PEFT
    experts add to the sum of all these (methods.md 7).

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = moe_jax.MoEConfig(expert=moe_jax.FFNConfig(dim=32), num_experts=4, top_k=2)
        >>> moe = moe_jax.MoE(config, 16, rngs=nnx.Rngs(0))
        >>> y, stats = moe(jnp.ones((2, 5, 16)))
        >>> y.shape, float(moe.auxiliary_loss(stats)) > 0
        ((2, 5, 16), True)
    """

    def __init__(self, config: MoEConfig, d_model: int, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        """Makes a layer with fresh parameters.

        Args:
          config: of the layer.
          d_model: width of the activations.
          rngs: random keys, stream `params`.
          dtype: of the parameters.
        """
        dtype = jnp.dtype(dtype)
        self.config = config
        self.d_model = d_model
        if config.universal == "coder":
            self.router = CoderRouter(d_model, config.num_experts, rngs=rngs, dtype=dtype)
        else:
            self.router = LinearRouter(
                d_model,
                config.num_experts,
                lora=config.router_lora,
                selection_bias=config.selection.bias,
                weighs_universal=config.universal == "sigmoid",
                rngs=rngs,
                dtype=dtype,
            )
        self.experts = make_bank(config.bank, config.expert, config.bank_experts, d_model, rngs=rngs, dtype=dtype)
        if config.merged_experts is not None:
            # The expert of the bank for every output of the router.
            self.groups = Fixed(jnp.arange(config.num_experts, dtype=jnp.int32) % config.merged_experts)
        if config.universal_beside:
            self.universal = FFN(config.universal_ffn, d_model, rngs=rngs, dtype=dtype)
        if config.perft is not None:
            self.perft = Perft(config.perft, d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "*B T d"], valid: Bool[Array, "*B T"] | None = None, key: Array | None = None
    ) -> tuple[Float[Array, "*B T d"], tuple[RouterStats, ...]]:
        """Applies the layer. Its output for a token depends only on the token's own sequence, and not on padding.

        Args:
          x: activations of any number of sequences.
          valid: tokens that are not padding, which goes to no expert and is in no statistic; None: all.
          key: the layer's random key in training; None: deterministic.

        Returns:
          The layer's output, and the statistics of its router and of the router of its PEFT experts, if they have one.

        Raises:
          InputError: if `x` is not of width `d_model`, or `valid` has not one entry for each token.
        """
        check_shape("x", x, (..., None, self.d_model))
        if valid is not None:
            check_shape("valid", valid, x.shape[:-1])
        tokens = x.reshape(-1, x.shape[-1])
        valid = None if valid is None else valid.reshape(-1)
        logits = self.router(tokens, keys.fold_in(key, keys.ROUTER_NOISE))
        routing, stats = route(
            logits,
            self.config.top_k,
            self.config.weighting,
            selection=self._selection(),
            scale=self.config.gate_scale,
            valid=valid,
            capacity_factor=self.config.capacity_factor,
            num_sequences=math.prod(x.shape[:-2]),
        )
        chosen = routing
        if self.config.merged_experts is not None:
            # Two choices may become the same expert: it is then applied with both weights.
            merged = jnp.take(self.groups[...], routing.experts, mode="clip")
            routing = routing._replace(experts=jnp.where(routing.experts == NO_EXPERT, NO_EXPERT, merged))
        if self.config.extended:
            weight = self._universal_weight(tokens, logits)
            routing = add_choice(routing, self.config.routed_experts, weight, valid)
        y = self.experts(tokens, routing, keys.fold_in(key, keys.EXPERTS))
        if self.config.universal_beside:
            universal = self.universal(tokens, keys.fold_in(key, keys.FFN))
            y = add_weighted(y, universal, self._universal_weight(tokens, logits))
        if self.config.perft is None:
            return y.reshape(x.shape), (stats,)
        added, own_stats = self.perft(tokens, chosen, valid, keys.fold_in(key, keys.PERFT))
        return (y + added).reshape(x.shape), (stats, *own_stats)

    def auxiliary_loss(self, stats: tuple[RouterStats, ...]) -> Float[Array, ""]:
        """Returns the layer's term of the training loss (methods.md 1), float32; `stats` as the call returned them."""
        return router_losses(self.config, stats)

    def _selection(self) -> Selection:
        given = self.config.selection
        bias = None
        if given.bias:
            assert isinstance(self.router, LinearRouter)
            # A checkpoint may hold the bias in another dtype.
            bias = self.router.selection_bias[...].astype(jnp.float32)
        return Selection(bias, given.groups, given.top_groups, given.group_score)

    def _universal_weight(self, tokens: Float[Array, "T d"], logits: Float[Array, "T E"]) -> Float[Array, " T"]:
        own = None
        if self.config.universal == "sigmoid":
            assert isinstance(self.router, LinearRouter)
            own = self.router.universal_logit(tokens)
        return universal_weight(logits, self.config.universal, own)
