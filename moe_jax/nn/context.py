"""The arguments that all layers of a forward pass share: visibility, rotary tables, and which tokens are padding."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.functional.attention import Visibility
from moe_jax.functional.position_embeddings import RopeConfig, rope_tables
from moe_jax.models.config import ModelConfig
from moe_jax.nn.cache import Slots
from moe_jax.nn.embed import default_positions

RopeTables = tuple[Float[Array, "B T r"], Float[Array, "B T r"]]
"""Cosines and sines of a rotary embedding."""

FixedContext = tuple[tuple[tuple[RopeConfig, int], ...], bool]
"""The static part of a context: the keys of its rotary tables, and whether the rows begin."""


class Source(NamedTuple):
    """The sequence that cross-attention attends to.

    Attributes:
      output: of an encoder; None: keys and values made from it are in the caches.
      visible: which queries see which tokens of it.
    """

    output: Float[Array, "B S e"] | None
    visible: Visibility


class Context(NamedTuple):
    """The arguments that all layers of a forward pass share.

    Attributes:
      rope: tables for the tokens, by rotary embedding and width of the rotated part of a head.
      visible: which tokens see which; with caches only the queries' part, as every cache has key positions of its own.
      valid: tokens that are not padding; None: all.
      source: for cross-attention; None: there is none.
      relative_bias: per head and distance, for layers whose attention has one.
      slots: the slots in the caches that the tokens are written to; None: there are no caches.
    """

    rope: Mapping[tuple[RopeConfig, int], RopeTables]
    visible: Visibility
    valid: Bool[Array, "B T"] | None = None
    source: Source | None = None
    relative_bias: Float[Array, "H n"] | None = None
    slots: Slots | None = None

    def split(self) -> tuple["Context", FixedContext]:
        """Splits the context into a pytree of arrays and a hashable rest, which a program takes as two arguments."""
        slots = None if self.slots is None else self.slots._replace(begins=None)
        arrays = self._replace(rope=tuple(self.rope.values()), slots=slots)
        return arrays, (tuple(self.rope), self.slots is not None and self.slots.begins)

    @classmethod
    def joined(cls, arrays: "Context", fixed: FixedContext) -> "Context":
        """Returns the context from the two parts that `split` returned."""
        rotations, begins = fixed
        slots = None if arrays.slots is None else arrays.slots._replace(begins=begins)
        return arrays._replace(rope=dict(zip(rotations, arrays.rope, strict=True)), slots=slots)


def make_context(
    config: ModelConfig,
    shape: tuple[int, ...],
    *,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    prefix: Int[Array, " B"] | None = None,
    encoder_output: Float[Array, "B S e"] | None = None,
    encoder_valid: Bool[Array, "B S"] | None = None,
    num_slots: int | None = None,
    num_source_slots: int | None = None,
    begins: bool = False,
    relative_bias: Float[Array, "H n"] | None = None,
) -> Context:
    """Makes the context of a pass over [B, T] tokens; arguments as in `Stack`.

    Args:
      config: of the model.
      shape: batch and length.
      positions, segment_ids, valid, prefix, encoder_output, encoder_valid, begins: see `Stack`.
      num_slots: of the longest cache; None: there are none.
      num_source_slots: of the caches of cross-attention; None: there are none.
      relative_bias: see `Context`.

    Raises:
      InputError: if the arguments do not fit each other or the model.
    """
    source_length = num_source_slots if encoder_output is None else encoder_output.shape[1]
    _check(config, segment_ids, prefix, source_length, encoder_valid, num_slots)
    if encoder_output is not None and num_source_slots not in (None, source_length):
        raise InputError(
            f"the caches have slots for {num_source_slots} tokens of an encoder's output, which has {source_length}"
        )
    _check_length(config, shape[1] if num_slots is None else num_slots)
    in_row = default_positions(shape)
    positions = in_row if positions is None else positions
    if valid is None and segment_ids is not None:
        valid = segment_ids > 0
    # Padding is a document of its own: no text sees it, and it does not make a text longer.
    segments = valid.astype(jnp.int32) if segment_ids is None and valid is not None else segment_ids
    slots = None
    if num_slots is not None:
        # Padding is written after the last token, where no query looks before the slot is written again.
        last = positions if valid is None else jnp.where(valid, positions, -1)
        slots = Slots(positions, jnp.max(last, axis=1), begins)
    if num_slots is None or begins:
        visible = Visibility(in_row, in_row, segments, segments, prefix)
    else:
        visible = Visibility(positions, positions, prefix=prefix)
    rotations = {(config.rope_of(layer), layer.attention.rope_dim) for layer in config.layers}
    limit = config.max_positions
    tables = {(rope, width): rope_tables(rope, width, limit, positions, segments) for rope, width in rotations}
    source = None
    if source_length is not None:
        keys = None if encoder_valid is None else encoder_valid.astype(jnp.int32)
        queries = None if encoder_valid is None else jnp.ones(shape, jnp.int32)
        source = Source(encoder_output, Visibility(in_row, default_positions((shape[0], source_length)), queries, keys))
    return Context(tables, visible, valid, source, relative_bias, slots)


def _check_length(config: ModelConfig, length: int) -> None:
    if config.bounded_positions and length > config.max_positions:
        raise InputError(
            f"rows of {length} positions, but beyond {config.max_positions} a {config.family!r} model computes "
            "something else, which is not supported; take shorter ones"
        )


def _check(
    config: ModelConfig,
    segment_ids: Array | None,
    prefix: Array | None,
    source_length: int | None,
    encoder_valid: Array | None,
    num_slots: int | None,
) -> None:
    masks = {layer.attention.mask for layer in config.layers}
    crosses = any(layer.cross is not None for layer in config.layers)
    if ("prefix" in masks) != (prefix is not None):
        raise InputError("the lengths of prefixes go with attention whose mask is 'prefix', and only with it")
    if crosses != (source_length is not None):
        raise InputError("an encoder's output goes with layers that have cross-attention, and only with them")
    if encoder_valid is not None and source_length is None:
        raise InputError("encoder_valid says what counts of encoder_output, which is not given")
    if segment_ids is not None and (num_slots is not None or prefix is not None or source_length is not None):
        raise InputError("packed documents (segment_ids) have neither caches, nor prefixes, nor an encoder's output")
    if num_slots is not None and "bidirectional" in masks:
        raise InputError("attention whose mask is 'bidirectional' has no cache: a token would see those after it")
