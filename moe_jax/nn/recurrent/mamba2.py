"""Mamba-2 with its projections, convolutions, norm and cache (Granite 4, Nemotron-H)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.experts.devices import shard_cache
from moe_jax.experts.shapes import normal_kernel
from moe_jax.functional.dense import rms_norm
from moe_jax.functional.keys import fold_in
from moe_jax.functional.recurrent.state_space import ScanInputs, state_scan
from moe_jax.models.config import ModelConfig
from moe_jax.models.recurrent_config import Mamba2Config
from moe_jax.nn.attention import make_projections
from moe_jax.nn.context import RecurrentCache
from moe_jax.nn.layers import Linear, Norm
from moe_jax.nn.recurrent.convolved import convolved


class Mamba2(nnx.Module):
    """Mamba-2 of a layer, described by its `Mamba2Config`; called as `nn.recurrent` says."""

    gate: Linear
    v: Linear
    k: Linear
    q: Linear
    decay: Linear
    o: Linear

    def __init__(self, config: Mamba2Config, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, linear in make_projections(config, model.d_model, rngs=rngs, dtype=dtype).items():
            setattr(self, name, linear)
        for name, channels in zip(config.convolved, config.carried.channels, strict=True):
            setattr(self, f"{name}_conv", nnx.Param(normal_kernel(rngs, (config.conv_width, channels), dtype)))
            if config.conv_bias:
                setattr(self, f"{name}_conv_bias", nnx.Param(jnp.zeros(channels, dtype)))
        # As in the paper: rates 1, 2, ..., and all of a token passes by the state.
        self.log_rate = nnx.Param(jnp.log(jnp.arange(1, config.num_heads + 1, dtype=jnp.float32)).astype(dtype))
        self.rate_bias, self.skip = (nnx.Param(jnp.ones(config.num_heads, dtype)) for _ in range(2))
        self.norm = Norm("rms", config.num_heads * config.head_dim, config.norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T d"],
        documents: Int[Array, "B T"] | None = None,
        *,
        cache: RecurrentCache | None = None,
        begins: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T d"], RecurrentCache | None]:
        """Scans along the rows; arguments as in `nn.recurrent`."""
        keys = {name: fold_in(key, index) for index, name in enumerate(self.config.projections)}
        given, inputs = {}, []
        for index, name in enumerate(self.config.convolved):
            mixed, held = convolved(
                getattr(self, name)(x, keys[name]),
                getattr(self, f"{name}_conv")[...],
                getattr(self, f"{name}_conv_bias")[...] if self.config.conv_bias else None,
                documents,
                None if cache is None else cache.inputs[index],
                begins=begins,
            )
            given[name] = jax.nn.silu(mixed).reshape(*x.shape[:2], -1, self.config.widths[name])
            inputs.append(held)
        v = given["v"].astype(jnp.float32)
        step = self.decay(x, keys["decay"]).astype(jnp.float32) + self._of_heads(self.rate_bias)
        step = jax.nn.softplus(step)
        if self.config.least_step > 0:
            step = jnp.maximum(step, self.config.least_step)
        scanned = ScanInputs(
            given["q"], given["k"], v * step[..., None], -jnp.exp(self._of_heads(self.log_rate)) * step
        )
        state = None if cache is None or begins else cache.state
        if state is None:
            state = jnp.zeros((x.shape[0], *(self.config.carried.state or ())), jnp.float32)
        read, state = state_scan(scanned, state, documents)
        if cache is not None:
            cache = RecurrentCache(tuple(inputs), shard_cache(state))
        y = (read + v * self._of_heads(self.skip)[..., None]).reshape(*x.shape[:2], -1)
        return self.o(self._gated(y, self.gate(x, keys["gate"])), keys["o"]), cache

    def _gated(self, y: Float[Array, "B T w"], gate: Float[Array, "B T w"]) -> Float[Array, "B T w"]:
        """Returns the heads' results times their gates, normed within every group of heads."""
        y = y * jax.nn.silu(gate.astype(jnp.float32))
        groups = (self.config.num_groups, -1)
        normed = rms_norm(y.reshape(*y.shape[:2], *groups), self.norm.scale[...].reshape(groups), self.norm.eps)
        return normed.reshape(y.shape).astype(gate.dtype)

    def _of_heads(self, parameter: nnx.Param) -> Float[Array, "1 1 H"]:
        return parameter[...].astype(jnp.float32)[None, None]
