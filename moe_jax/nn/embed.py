"""The first part of a model: from token ids to activations."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.experts.forms.matrix import normal_kernel
from moe_jax.models.config import ModelConfig


class Embed(nnx.Module):
    """Token embeddings [V, d], scaled, plus learned positions [P, d] where the model has them.

    Attributes:
      compute_dtype: dtype of the activations.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, compute_dtype: DTypeLike = jnp.float32):
        dtype = jnp.dtype(config.dtype)
        self.scale = config.embed_scale
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.has_positions = config.learned_positions
        self.embedding = nnx.Param(normal_kernel(rngs, (config.vocab_size, config.d_model), dtype))
        if self.has_positions:
            self.positions = nnx.Param(normal_kernel(rngs, (config.max_positions, config.d_model), dtype))

    def __call__(
        self,
        tokens: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        *,
        embeddings: Float[Array, "B T d"] | None = None,
    ) -> Float[Array, "B T d"]:
        """Returns the activations for the first layer.

        Args:
          tokens: token ids.
          positions: position of every token in its document, for learned positions; None: 0, 1, ...
          embeddings: in place of tokens, as `look_up` returns them.

        Raises:
          InputError: unless exactly one of tokens and embeddings is given.
        """
        if (tokens is None) == (embeddings is None):
            raise InputError("a model takes either tokens or embeddings, and exactly one of them")
        if embeddings is not None:
            x = embeddings.astype(self.compute_dtype)
        else:
            assert tokens is not None
            x = self.look_up(tokens)
        if not self.has_positions:
            return x
        if positions is None:
            positions = default_positions(x.shape[:2])
        return x + jnp.take(self.positions[...], positions, axis=0).astype(self.compute_dtype)

    def look_up(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        """Returns scaled token embeddings, into which other embeddings, for example of images, may be spliced."""
        x = jnp.take(_whole_rows(self.embedding[...]), tokens, axis=0).astype(self.compute_dtype)
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, self.compute_dtype)


def default_positions(shape: tuple[int, ...]) -> Int[Array, "B T"]:
    """Returns positions 0, 1, ... in every row."""
    return jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None, :], shape)


def _whole_rows(embedding: Float[Array, "V d"]) -> Float[Array, "V d"]:
    """Gathers the embedding over `fsdp`, on a mesh, before tokens are looked up.

    If tokens were looked up in slices of `d`, activations would have to change from a split width to a split batch, for
    which the compiler would copy the whole batch to every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return embedding
    return jax.lax.with_sharding_constraint(embedding, P("tensor", None))
