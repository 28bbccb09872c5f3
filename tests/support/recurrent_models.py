"""Models some of whose layers carry a state, applied to the same texts in other ways."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.nn import Decoder, init_cache


def logits_in_other_ways(model: Decoder, tokens: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Logits of two texts [2, T], from one program for both ways.

    In pieces with a cache, a token and then the rest with padding behind it; and as packed documents, both in one row
    behind padding.
    """
    graphdef, state = nnx.split(model)
    length = tokens.shape[1]

    @jax.jit
    def run(state, tokens):
        model, zeros = nnx.merge(graphdef, state), jnp.zeros((2, 3), jnp.int32)
        caches, pieces = init_cache(model.config, 2, length + 4, jnp.dtype("float32")), []
        for start, stop in ((0, 1), (1, length)):
            padding = zeros[:, : 3 if start else 0]
            positions = jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32)[None], (2, stop - start))
            out = model(
                jnp.concatenate([tokens[:, start:stop], padding], axis=1),
                positions=jnp.concatenate([positions, padding + stop], axis=1),
                valid=jnp.concatenate([positions >= 0, padding > 0], axis=1),
                caches=caches,
            )
            caches = out.caches
            pieces.append(out.logits[:, : stop - start])
        of_document = jnp.arange(length, dtype=jnp.int32)
        packed = model(
            jnp.concatenate([zeros[:1], tokens.reshape(1, -1)], axis=1),
            positions=jnp.concatenate([zeros[0], of_document, of_document])[None],
            segment_ids=jnp.asarray([[0] * 3 + [1] * length + [2] * length], jnp.int32),
        )
        return jnp.concatenate(pieces, axis=1), packed.logits[0, 3:].reshape(2, length, -1)

    return run(state, jnp.asarray(tokens, jnp.int32))
