"""The decoder: embedding, stack and head of one `ModelConfig`, whatever the family."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moe_jax.models.config import ModelConfig
from moe_jax.nn.embed import Embed
from moe_jax.nn.head import Head
from moe_jax.nn.router_stats import StackedStats
from moe_jax.nn.stack import Caches, Stack


class DecoderOutput(NamedTuple):
    """Attributes:
    logits: float32; of the last position only, if asked for.
    caches: updated caches, or None without caches.
    router: what the routers did (see `StackedStats`).
    """

    logits: Float[Array, "B T V"]
    caches: Caches | None
    router: StackedStats


class Decoder(nnx.Module):
    """From tokens to logits: `Embed`, `Stack` and `Head`, each of which can be used alone.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> decoder = moe_jax.Decoder(moe_jax.tiny_model(experts=4).config, rngs=nnx.Rngs(0))
        >>> decoder(jnp.zeros((2, 5), jnp.int32)).logits.shape
        (2, 5, 64)

    Attributes:
      config: the description it was built from.
      compute_dtype: dtype of the activations; parameters keep their own and are cast where they are used.
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, compute_dtype: DTypeLike = jnp.float32, remat: str = "none"
    ):
        """Draws the parameters; `remat` as in `Stack`."""
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.embed = Embed(config, rngs=rngs, compute_dtype=compute_dtype)
        self.stack = Stack(config, rngs=rngs, remat=remat)
        self.lm_head = Head(config, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"] | None = None,
        *,
        embeddings: Float[Array, "B T d"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        prefix: Int[Array, " B"] | None = None,
        encoder_output: Float[Array, "B S e"] | None = None,
        encoder_valid: Bool[Array, "B S"] | None = None,
        caches: Caches | None = None,
        last_only: Int[Array, " B"] | None = None,
        key: Array | None = None,
    ) -> DecoderOutput:
        """Next-token logits.

        Args:
          tokens: token ids.
          embeddings: in place of tokens, what `Embed.look_up` gives for them.
          positions: see `Stack`, as for all that is not explained here.
          segment_ids: documents packed in a row.
          valid: tokens that are not padding.
          prefix: lengths of prefixes.
          encoder_output: for cross-attention.
          encoder_valid: tokens of it that are not padding.
          caches: to continue a row.
          last_only: index of the one position per row whose logits are wanted; None: all.
          key: of all that is random in training (the noise of `coder` routers); None, as at evaluation: nothing is.

        Raises:
          InputError: if the arguments do not go together or with the model.
        """
        x, caches, router = self.stack(
            self.embed(tokens, positions, embeddings=embeddings),
            positions=positions,
            segment_ids=segment_ids,
            valid=valid,
            prefix=prefix,
            encoder_output=encoder_output,
            encoder_valid=encoder_valid,
            caches=caches,
            key=key,
        )
        if last_only is not None:
            x = jnp.take_along_axis(x, last_only[:, None, None], axis=1)
        logits = self.lm_head(x, self.embed.embedding[...] if self.config.tie_embeddings else None)
        return DecoderOutput(logits, caches, router)
