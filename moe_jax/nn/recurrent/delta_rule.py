"""The gated delta rule with its projections, convolutions, norm and cache (Qwen3-Next, Qwen3.5)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.experts.devices import BATCH_AXES, current_mesh, sequence_axis, shard_cache, splits_batch
from moe_jax.experts.shapes import normal_kernel
from moe_jax.functional.keys import fold_in
from moe_jax.functional.recurrent.delta_rule import DeltaInputs, delta_rule
from moe_jax.models.config import ModelConfig
from moe_jax.models.recurrent_config import DeltaRuleConfig
from moe_jax.nn.attention import make_projections
from moe_jax.nn.context import RecurrentCache
from moe_jax.nn.layers import Linear, Norm
from moe_jax.nn.recurrent.convolved import convolved


class DeltaRule(nnx.Module):
    """The gated delta rule of a layer, described by its `DeltaRuleConfig`; called as `nn.recurrent` says."""

    q: Linear
    k: Linear
    v: Linear
    gate: Linear
    beta: Linear
    decay: Linear
    o: Linear

    def __init__(self, config: DeltaRuleConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, linear in make_projections(config, model.d_model, rngs=rngs, dtype=dtype).items():
            setattr(self, name, linear)
        for name, channels in zip("qkv", config.carried.channels, strict=True):
            setattr(self, f"{name}_conv", nnx.Param(normal_kernel(rngs, (config.conv_width, channels), dtype)))
        # A rate of 1 and a bias of 1: a state is forgotten within a few tokens, until training says otherwise.
        self.log_rate = nnx.Param(jnp.zeros(config.num_heads, dtype))
        self.rate_bias = nnx.Param(jnp.ones(config.num_heads, dtype))
        self.norm = Norm("rms", config.value_dim, config.norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T d"],
        documents: Int[Array, "B T"] | None = None,
        *,
        cache: RecurrentCache | None = None,
        begins: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T d"], RecurrentCache | None]:
        """Applies the rule along the rows; arguments as in `nn.recurrent`."""
        keys = {name: fold_in(key, index) for index, name in enumerate(self.config.projections)}
        heads, inputs = [], []
        for index, (name, width) in enumerate(zip("qkv", self._widths, strict=True)):
            projected, kernel = getattr(self, name)(x, keys[name]), getattr(self, f"{name}_conv")[...]
            held = None if cache is None else cache.inputs[index]
            mixed, held = convolved(projected, kernel, None, documents, held, begins=begins)
            heads.append(jax.nn.silu(mixed).reshape(*x.shape[:2], -1, width))
            inputs.append(held)
        beta, decay = (getattr(self, name)(x, keys[name]).astype(jnp.float32) for name in ("beta", "decay"))
        log_decay = -self._rate() * jax.nn.softplus(decay + self.rate_bias[...].astype(jnp.float32)[None, None])
        q, k, v = heads
        given = DeltaInputs(q, k, v, jax.nn.sigmoid(beta), log_decay)
        read, state = _over_mesh(given, None if cache is None or begins else cache.state, documents)
        if cache is not None:
            cache = RecurrentCache(tuple(inputs), shard_cache(state))
        return self._out(read, x, keys), cache

    def _out(
        self, read: Float[Array, "B T H V"], x: Float[Array, "B T d"], keys: dict[str, Array | None]
    ) -> Float[Array, "B T d"]:
        """Returns what the heads read, normed and gated, through the last map."""
        gate = self.gate(x, keys["gate"]).reshape(read.shape).astype(jnp.float32)
        y = (self.norm(read).astype(jnp.float32) * jax.nn.silu(gate)).astype(x.dtype)
        return self.o(y.reshape(*x.shape[:2], -1), keys["o"])

    def _rate(self) -> Float[Array, "1 1 H"]:
        return jnp.exp(self.log_rate[...].astype(jnp.float32))[None, None]

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.config.key_dim, self.config.key_dim, self.config.value_dim


def _over_mesh(
    inputs: DeltaInputs, state: Float[Array, "B H K V"] | None, documents: Int[Array, "B T"] | None
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Applies the rule, over a mesh by every device to its own rows and heads."""
    mesh, (batch, length, heads, width) = current_mesh(), inputs.v.shape
    if mesh is None:
        return delta_rule(inputs, state, documents)
    if sequence_axis(mesh, length) is not None:
        raise InputError(
            f"the mesh splits sequences over sequence={mesh.shape['sequence']} devices, and the gated delta rule "
            "carries a state along them; take a mesh with sequence=1"
        )
    if state is None:
        state = jnp.zeros((batch, heads, inputs.k.shape[-1], width), jnp.float32)
    rows = BATCH_AXES if splits_batch(mesh, batch) else None
    split = "tensor" if inputs.k.shape[2] % mesh.shape["tensor"] == 0 else None
    of_tokens = jax.tree.map(lambda one: P(rows, None, split, *[None] * (one.ndim - 3)), inputs)
    of_state = P(rows, split, None, None)
    of_documents = None if documents is None else P(rows, None)
    return jax.shard_map(
        delta_rule,
        in_specs=(of_tokens, of_state, of_documents),
        out_specs=(P(rows, None, split, None), of_state),
        check_vma=False,
    )(inputs, state, documents)
