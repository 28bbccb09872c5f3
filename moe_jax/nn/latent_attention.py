"""Multi-head latent attention (DeepSeek-V2), with a cache that holds latents instead of keys and values."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.layout.mesh import attention_placement, shard_batch
from moe_jax.functional.attention import Visibility, attention
from moe_jax.functional.attention_chunks import MOST_QUERIES, cached_attention
from moe_jax.functional.keys import fold_in
from moe_jax.functional.position_embeddings import apply_rope
from moe_jax.models.config import AttentionConfig, LatentConfig, ModelConfig
from moe_jax.nn.attention import make_projections
from moe_jax.nn.cache import LatentCache, Slots
from moe_jax.nn.layers import Linear, Norm


class LatentAttention(nnx.Module):
    """Attention whose keys and values are computed from one latent per token (see `LatentConfig`).

    There are two ways to the same result. Either keys and values are computed from all latents; or, since they are
    linear in the latents, their kernel is applied to queries and results instead, and heads attend to the latents
    themselves. The second is cheaper for few queries: a generated token costs as much as with a single key head.
    """

    q: Linear
    q_down: Linear
    q_up: Linear
    kv_down: Linear
    kv_up: Linear
    o: Linear

    def __init__(self, config: AttentionConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, linear in make_projections(config, model.d_model, rngs=rngs, dtype=dtype).items():
            setattr(self, name, linear)
        latent = self._latent
        if latent.q_rank is not None:
            self.q_norm = Norm("rms", latent.q_rank, latent.norm_eps, dtype=dtype)
        self.kv_norm = Norm("rms", latent.kv_rank, latent.norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T d"],
        visible: Visibility,
        *,
        rope: tuple[Array, Array] | None = None,
        cache: LatentCache | None = None,
        slots: Slots | None = None,
        bias: None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T d"], LatentCache | None]:
        """Attends to the input itself, or to a cache; arguments as in `Attention`."""
        keys = {name: fold_in(key, index) for index, name in enumerate(self.config.projections)}
        if self._latent.q_rank is None:
            q = self.q(x, keys["q"])
        else:
            q = self.q_up(self.q_norm(shard_batch(self.q_down(x, keys["q_down"]))), keys["q_up"])
        q = q.reshape(*x.shape[:2], -1, self.config.head_dim)
        # Every device needs whole latents: norms are over their width, and heads are computed from all of it.
        down = shard_batch(self.kv_down(x, keys["kv_down"]))
        latent, shared = self.kv_norm(down[..., : self._latent.kv_rank]), down[..., self._latent.kv_rank :]
        if rope is not None:
            turn = partial(apply_rope, cos=rope[0], sin=rope[1], interleaved=self._latent.interleaved)
            q = jnp.concatenate([q[..., : self._plain], turn(q[..., self._plain :])], axis=-1)
            shared = turn(shared[:, :, None, :])[:, :, 0, :]
        begins = True
        if cache is not None:
            assert slots is not None, "a cache goes with slots"
            begins, cache = slots.begins, LatentCache(slots.write(cache.latent, latent), slots.write(cache.key, shared))
            if not begins:
                latent, shared = cache.latent.astype(x.dtype), cache.key.astype(x.dtype)
                visible = visible._replace(key_positions=slots.key_positions(latent.shape[1]))
        if not begins and self._is_cheaper_absorbed(x.shape[1], latent.shape[1]):
            y = self._attend_to_latents(q, latent, shared, visible)
        else:
            y = self._attend_to_heads(q, latent, shared, visible, keys["kv_up"], aligned=begins)
        return self.o(y.reshape(*x.shape[:2], -1), keys["o"]), cache

    def _attend_to_heads(
        self, q: Array, latent: Array, shared: Array, visible: Visibility, key: Array | None, *, aligned: bool
    ) -> Float[Array, "B T H W"]:
        """Attends to keys and values of every head, computed from the latents."""
        made = self.kv_up(latent, key).reshape(*latent.shape[:2], self.config.num_heads, -1)
        of_all = jnp.broadcast_to(shared[:, :, None, :], (*made.shape[:3], shared.shape[-1]))
        k = jnp.concatenate([made[..., : self._plain], of_all], axis=-1)
        return self._attention(q, k, made[..., self._plain :], visible, aligned=aligned)

    def _attend_to_latents(
        self, q: Array, latent: Array, shared: Array, visible: Visibility
    ) -> Float[Array, "B T H W"]:
        """Attends to latents, for caches: turns queries into queries of latents, and results into results of heads."""
        up = self.kv_up.materialise().astype(q.dtype).reshape(self._latent.kv_rank, self.config.num_heads, -1)
        of_latents = jnp.einsum("bthn,rhn->bthr", q[..., : self._plain], up[..., : self._plain])
        if q.shape[1] <= MOST_QUERIES:
            config, values = self.config, latent[:, None]
            parts = [(of_latents, values), (q[..., self._plain :], shared[:, None])]
            y = cached_attention(
                parts, values, visible, mask=config.mask, window=config.sliding_window, scale=config.score_scale
            )
        else:
            q = jnp.concatenate([of_latents, q[..., self._plain :]], axis=-1)
            k = jnp.concatenate([latent, shared], axis=-1)[:, :, None, :]
            y = self._attention(q, k, latent[:, :, None, :], visible, aligned=False)
        return jnp.einsum("bthr,rhw->bthw", y, up[..., self._plain :])

    def _attention(self, q: Array, k: Array, v: Array, visible: Visibility, *, aligned: bool) -> Array:
        config = self.config
        return attention(
            q, k, v, visible,
            mask=config.mask, window=config.sliding_window, scale=config.score_scale, aligned=aligned,
            placement=attention_placement(*q.shape[:2]),
        )  # fmt: skip

    def _is_cheaper_absorbed(self, queries: int, slots: int) -> bool:
        """Whether attending to latents takes fewer multiplications per row and head."""
        rank, rotated = self._latent.kv_rank, self._latent.rope_dim
        made = self._plain + self._latent.value_dim
        of_heads = slots * rank * made + queries * slots * (made + rotated)
        return queries * rank * made + queries * slots * (2 * rank + rotated) < of_heads

    @property
    def _latent(self) -> LatentConfig:
        assert self.config.latent is not None
        return self.config.latent

    @property
    def _plain(self) -> int:
        """Width of the part of queries and keys that is not rotated."""
        return self.config.head_dim - self.config.rope_dim
