"""The compiled programs of generation: one that reads the prompts, one that adds a block of tokens.

Both choose tokens themselves, so that between two blocks nothing but tokens leaves the device. The number of tokens of
a block, the tokens that end a text, the temperature and `top_p` are data: none of them is compiled anew.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from moe_jax.functional.heads.sampling import sample
from moe_jax.nn import Caches, init_cache

MOST_STEPS = 32
"""Tokens of the longest block."""


class Choosing(NamedTuple):
    """How tokens are chosen: what of it is compiled into the programs; `sampling` says what it means."""

    greedy: bool
    top_k: int | None
    has_top_p: bool


class Sampling(NamedTuple):
    """How tokens are chosen: the data.

    Attributes:
      stop_ids: tokens that end a text; -1 stands for none.
    """

    key: PRNGKeyArray
    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    stop_ids: Int[Array, " n"]


class Progress(NamedTuple):
    """Rows that are being continued.

    Attributes:
      caches: of all tokens but the last of every row.
      tokens: the last token of every row.
      positions: theirs.
      step: how many tokens every row was given.
      stopped: rows that were given a token that ends a text; they are continued until all have one.
      finite: whether the logits of every row always were.
      encoder_valid: what counts of the encoder's output; None: there is none.
    """

    caches: Caches
    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    step: Int[Array, ""]
    stopped: Bool[Array, " B"]
    finite: Bool[Array, " B"]
    encoder_valid: Bool[Array, "B S"] | None

    def goes_on(self) -> Bool[Array, ""]:
        """Whether another token is wanted, and can be chosen."""
        return ~jnp.all(self.stopped) & jnp.all(self.finite)


@partial(jax.jit, static_argnames=("graphdef", "choosing", "slots"))
def begin(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    sampling: Sampling,
    *,
    choosing: Choosing,
    slots: int,
) -> Progress:
    """Reads prompts, padded on the right, and chooses the first token of every row.

    With an encoder, that is what reads the prompts, and the decoder begins with its own first token.

    Args:
      graphdef, state: of a `Decoder` whose layers are not stacked (`nn.unstacked`).
      prompts: token ids.
      lengths: of the prompts.
      sampling, choosing: how tokens are chosen.
      slots: positions that the longest row may have.
    """
    model = nnx.merge(graphdef, state)
    batch, length = prompts.shape
    in_row = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], prompts.shape)
    valid = in_row < lengths[:, None]
    source_slots = length if model.config.has_encoder else None
    caches = init_cache(
        model.config, batch, slots, model.compute_dtype, source_slots=source_slots, stacked=False, rings=True
    )
    if model.config.has_encoder:
        first = jnp.full((batch, 1), model.config.decoder_start_id, jnp.int32)
        out = model(
            first, inputs=prompts, inputs_valid=valid, positions=jnp.zeros_like(first), caches=caches, begins=True
        )
        positions = jnp.zeros_like(lengths)
    else:
        out = model(prompts, positions=in_row, valid=valid, caches=caches, begins=True, last_only=lengths - 1)
        positions = lengths - 1
    assert out.caches is not None
    empty = Progress(
        caches=out.caches,
        tokens=jnp.zeros((batch,), jnp.int32),
        positions=positions,
        step=jnp.zeros((), jnp.int32),
        stopped=jnp.zeros((batch,), bool),
        finite=jnp.ones((batch,), bool),
        encoder_valid=valid if model.config.has_encoder else None,
    )
    return _advance(empty, out.logits[:, 0], sampling, choosing)


@partial(jax.jit, static_argnames=("graphdef", "choosing"), donate_argnames="progress")
def continue_rows(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    progress: Progress,
    sampling: Sampling,
    last_step: Int[Array, ""],
    *,
    choosing: Choosing,
) -> tuple[Progress, Int[Array, "n B"]]:
    """Adds tokens to all rows until they were given `last_step`, or no more are wanted; at most `MOST_STEPS`.

    Args:
      graphdef, state: as for `begin`.
      progress: the rows; their caches are updated in place.
      sampling, choosing: how tokens are chosen.
      last_step: as far as the rows are continued.

    Returns:
      The rows, and the tokens that they were given: a row of it per step, the later ones without meaning where fewer
      steps were made.
    """
    model, before = nnx.merge(graphdef, state), progress.step
    last_step = jnp.minimum(last_step, before + MOST_STEPS)

    def goes_on(carry: tuple[Progress, Array]) -> Array:
        return (carry[0].step < last_step) & carry[0].goes_on()

    def one_step(carry: tuple[Progress, Array]) -> tuple[Progress, Array]:
        progress, block = carry
        out = model(
            progress.tokens[:, None],
            positions=progress.positions[:, None],
            caches=progress.caches,
            encoder_valid=progress.encoder_valid,
        )
        assert out.caches is not None
        after = _advance(progress._replace(caches=out.caches), out.logits[:, 0], sampling, choosing)
        return after, jax.lax.dynamic_update_index_in_dim(block, after.tokens, progress.step - before, 0)

    block = jnp.zeros((MOST_STEPS, progress.tokens.shape[0]), jnp.int32)
    return jax.lax.while_loop(goes_on, one_step, (progress, block))


def _advance(progress: Progress, logits: Float[Array, "B V"], sampling: Sampling, choosing: Choosing) -> Progress:
    """The rows with a token more."""
    tokens = sample(
        logits,
        jax.random.fold_in(sampling.key, progress.step),
        temperature=0.0 if choosing.greedy else sampling.temperature,
        top_k=choosing.top_k,
        top_p=sampling.top_p if choosing.has_top_p else None,
    )
    return progress._replace(
        tokens=tokens,
        positions=progress.positions + 1,
        step=progress.step + 1,
        stopped=progress.stopped | jnp.any(tokens[:, None] == sampling.stop_ids[None, :], axis=1),
        finite=progress.finite & jnp.all(jnp.isfinite(logits), axis=-1),
    )
