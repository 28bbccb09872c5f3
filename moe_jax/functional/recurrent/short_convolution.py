"""Short causal convolutions of every channel with itself, which stop at the borders of documents."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_convolution(
    x: Float[Array, "B T c"],
    kernel: Float[Array, "n c"],
    before: Float[Array, "B m c"],
    documents: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T c"]:
    """Returns `y_t = sum_j kernel_j * x_{t - n + 1 + j}`, summed in float32, in the dtype of `x`.

    Tokens of other documents, and padding, count as zeros. A document must stand in one piece, with padding before or
    behind it.

    Args:
      x: inputs.
      kernel: the factors of the last n tokens, of the present one last.
      before: the inputs of the m = n - 1 tokens before the first, zeros where there are none.
      documents: document of every token, counted from 1; 0 is padding. The tokens before are of the first document.
        None: a row is one document.
    """
    width, length = kernel.shape[0], x.shape[1]
    assert before.shape[1] == width - 1, (before.shape, kernel.shape)
    padded = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    of_padded = None if documents is None else _with_documents_before(documents, width - 1)
    total = jnp.zeros(x.shape, jnp.float32)
    for step in range(width):
        seen = padded[:, step : step + length].astype(jnp.float32) * kernel[step].astype(jnp.float32)[None, None]
        if of_padded is not None and documents is not None:
            is_same = (of_padded[:, step : step + length] == documents) & (documents > 0)
            seen = jnp.where(is_same[:, :, None], seen, 0.0)
        total = total + seen
    return total.astype(x.dtype)


def last_inputs(
    x: Float[Array, "B T c"], before: Float[Array, "B m c"], documents: Int[Array, "B T"] | None = None
) -> Float[Array, "B m c"]:
    """Returns the inputs of the last m tokens that are not padding, in the dtype of `before`, to go on from there.

    Args:
      x: inputs.
      before: the inputs of the m tokens before the first.
      documents: as in `short_convolution`; all that are not padding belong to the document that goes on.
    """
    width = before.shape[1]
    padded = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
    if documents is None:
        return padded[:, padded.shape[1] - width :]
    end = last_token(documents) + 1
    places = end[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.take_along_axis(padded, places[:, :, None], axis=1)


def last_token(documents: Int[Array, "B T"]) -> Int[Array, " B"]:
    """Returns the index of the last token of every row that is not padding; -1: there is none."""
    indices = jnp.arange(documents.shape[1], dtype=jnp.int32)[None]
    return jnp.max(jnp.where(documents > 0, indices, -1), axis=1)


def _with_documents_before(documents: Int[Array, "B T"], width: int) -> Int[Array, "B S"]:
    """Returns the documents with those of the tokens before the first, which belong to the first document."""
    first = jnp.max(jnp.where(_is_first(documents), documents, 0), axis=1)
    before = jnp.broadcast_to(first[:, None], (documents.shape[0], width))
    return jnp.concatenate([before, documents], axis=1)


def _is_first(documents: Int[Array, "B T"]) -> Array:
    """Whether a token is the first of its row that is not padding."""
    counted = documents > 0
    return counted & (jnp.cumsum(counted.astype(jnp.int32), axis=1) == 1)
