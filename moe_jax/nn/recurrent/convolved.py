"""Short convolutions of a recurrent layer's inputs, which go on from the inputs that its cache holds."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.experts.devices import shard_cache
from moe_jax.functional.recurrent.short_convolution import last_inputs, short_convolution


def convolved(
    x: Float[Array, "B T c"],
    kernel: Float[Array, "n c"],
    bias: Float[Array, " c"] | None,
    documents: Int[Array, "B T"] | None,
    held: Float[Array, "B m c"] | None,
    *,
    begins: bool,
) -> tuple[Float[Array, "B T c"], Float[Array, "B m c"] | None]:
    """Returns the inputs convolved along their rows, and what a cache holds afterwards; None: there is none.

    Args:
      x: inputs.
      kernel: of the convolution, over n = m + 1 tokens.
      bias: added to what is convolved; None: there is none.
      documents: document of every token, as in `short_convolution`.
      held: the inputs of the last m tokens, as the cache has them; None: there is no cache.
      begins: whether rows begin with this call, whatever the cache holds.
    """
    before = held
    if before is None or begins:
        before = jnp.zeros((x.shape[0], kernel.shape[0] - 1, x.shape[-1]), x.dtype)
    y = short_convolution(x, kernel, before, documents)
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, None]
    if held is not None:
        held = shard_cache(last_inputs(x, before.astype(held.dtype), documents))
    return y, held
