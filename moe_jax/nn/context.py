"""The arguments that all layers of a forward pass share: visibility, rotary tables, padding; and caches.

A cache of S slots holds the token at position p in slot `p mod S`. A cache with a slot for every position of the row
holds the row in order; a shorter one is a ring, in which a token overwrites the one S positions before it. The cache of
a recurrence has no slots: it is what the last call left.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.experts.devices import current_mesh, shard_cache
from moe_jax.functional.attention import Visibility
from moe_jax.functional.position_embeddings import RopeConfig, rope_tables
from moe_jax.kernels.hardware import bucket
from moe_jax.models.attention_config import AttentionConfig
from moe_jax.models.config import ModelConfig
from moe_jax.models.layer_config import LayerConfig
from moe_jax.models.recurrent_config import RecurrentConfig
from moe_jax.models.segments import Segment, segments_of, single_layers
from moe_jax.nn.inputs import as_array, check_range, is_traced
from moe_jax.nn.inside import NOTHING_ASKED, AtRouter, ChangeLogits
from moe_jax.nn.layers import default_positions


class KVCache(NamedTuple):
    """Keys (rotated) and values of one layer.

    Attributes:
      cross: the cache of cross-attention, where slot s holds token s of the encoder's output; None: it has none.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    cross: "KVCache | None" = None


class LatentCache(NamedTuple):
    """Latents (normed) and shared keys (rotated) of one layer. It never has a cache of cross-attention.

    Attributes:
      index: keys of the layer's indexer (rotated); None: it has none.
    """

    latent: Float[Array, "B S r"]
    key: Float[Array, "B S p"]
    index: Float[Array, "B S i"] | None = None
    cross: None = None


class RecurrentCache(NamedTuple):
    """The state of one layer with a recurrence, as large for a long row as for a short one: it has no slots.

    Attributes:
      inputs: of every short convolution of the layer, those of the last tokens.
      state: float32, of the shape that the layer's config says; None: it has none.
      cross: never a cache of cross-attention.
    """

    inputs: tuple[Float[Array, "B n c"], ...]
    state: Float[Array, "B ..."] | None
    cross: None = None


Cache = KVCache | LatentCache | RecurrentCache
Caches = tuple[tuple[Cache, ...], ...]
"""Per segment, one cache per block of its pattern, with arrays stacked over the repeats."""


class Slots(NamedTuple):
    """The slots in caches that the tokens of a call are written to.

    Attributes:
      positions: of the tokens.
      last: for every row, the position of the last token that is not padding.
      begins: whether the rows begin with this call, so that its tokens see each other and nothing in the caches.
      layer: which layer of the caches, whose arrays then have a leading axis of layers; None: they are of one layer.
    """

    positions: Int[Array, "B T"]
    last: Int[Array, " B"]
    begins: bool
    layer: Int[Array, ""] | None = None

    def key_positions(self, size: int) -> Int[Array, "B S"]:
        """Returns the position of the token in each of `size` slots after this call; a later one for empty slots."""
        slot = jnp.arange(size, dtype=jnp.int32)[None, :]
        behind = (self.last[:, None] - slot) % size
        return jnp.where(behind <= self.last[:, None], self.last[:, None] - behind, slot)

    def read(self, cache: Array) -> Array:
        """Returns the part of this layer of a cache of any kind."""
        return cache if self.layer is None else jax.lax.dynamic_index_in_dim(cache, self.layer, keepdims=False)

    def put(self, cache: Array, of_layer: Array) -> Array:
        """Returns a cache of any kind in which the part of this layer is replaced."""
        if self.layer is None:
            return of_layer.astype(cache.dtype)
        return jax.lax.dynamic_update_index_in_dim(cache, of_layer.astype(cache.dtype), self.layer, 0)

    def write(self, cache: Float[Array, "... S w"], tokens: Float[Array, "B *H T w"]) -> Array:
        """Returns a cache, with or without an axis of heads, with the tokens of this call written to it."""
        tokens = tokens.astype(cache.dtype)
        if self.layer is None:
            return shard_cache(self._written(cache[None], tokens, jnp.int32(0))[0])
        return shard_cache(self._written(cache, tokens, self.layer), of_layers=True)

    def _written(
        self, cache: Float[Array, "L B *H S w"], tokens: Float[Array, "B *H T w"], layer: Int[Array, ""]
    ) -> Float[Array, "L B *H S w"]:
        size, length, axis = cache.shape[-2], tokens.shape[-2], tokens.ndim - 2
        if length == 1 and not self.begins:
            put, at = _put_tokens, (self.positions[:, 0] % size).astype(jnp.int32)
            if current_mesh() is None:
                put = partial(jax.lax.platform_dependent, cpu=_put_one_by_one, default=_put_tokens)
            return put(cache, tokens, at, layer)
        if not self.begins:
            rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
            of_layer = jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False)
            moved = jnp.moveaxis(of_layer, axis, 1).at[rows, self.positions % size].set(jnp.moveaxis(tokens, axis, 1))
            tokens = jnp.moveaxis(moved, 1, axis)
        elif length > size:
            kept = jnp.expand_dims(self.key_positions(size), (*range(1, axis), axis + 1))
            tokens = jnp.take_along_axis(tokens, kept, axis=axis)
        return jax.lax.dynamic_update_slice(cache, tokens[None], (layer, *[jnp.int32(0)] * tokens.ndim))


def _put_tokens(cache: Array, tokens: Array, slots: Int[Array, " B"], layer: Int[Array, ""]) -> Array:
    zeros = [jnp.int32(0)] * (tokens.ndim - 3)

    def put(row: Array, token: Array, slot: Array) -> Array:
        return jax.lax.dynamic_update_slice(row, token[None], (layer, *zeros, slot, jnp.int32(0)))

    return jax.vmap(put, in_axes=(1, 0, 0), out_axes=1)(cache, tokens, slots)


def _put_one_by_one(cache: Array, tokens: Array, slots: Int[Array, " B"], layer: Int[Array, ""]) -> Array:
    """Does the same as a loop: XLA:CPU would fuse an update, and a copy, with all that reads the cache afterwards."""
    zeros = [jnp.int32(0)] * (tokens.ndim - 3)

    def put(row: Array, cache: Array) -> Array:
        token = jax.lax.dynamic_slice_in_dim(tokens, row, 1, 0)
        return jax.lax.dynamic_update_slice(cache, token[None], (layer, row, *zeros, slots[row], jnp.int32(0)))

    # A loop with a known single turn would be unrolled; slots are never negative, but the compiler does not know it.
    rows = jnp.where(slots[0] >= 0, jnp.int32(tokens.shape[0]), jnp.int32(0))
    return jax.lax.fori_loop(jnp.int32(0), rows, put, cache)


def init_cache(
    config: ModelConfig,
    batch: int,
    slots: int,
    dtype: jnp.dtype,
    *,
    source_slots: int | None = None,
    stacked: bool = True,
    rings: bool = False,
) -> Caches:
    """Returns empty caches for a decoder.

    Args:
      config: of the model.
      batch: rows.
      slots: most tokens of a row.
      dtype: of the caches.
      source_slots: tokens of the encoder's output, for cross-attention: the first call with the caches is given the
        output, and later ones find its keys and values in the caches. None: every call is given it.
      stacked: for a model whose layers are stacked, as they are unless they were unstacked (`nn.decoder.unstacked`).
      rings: layers with a sliding window, or with blocks, have only the slots that these need. The first call then
        must begin the rows (`begins`), and later calls must have one token per row.
    """
    segments = segments_of(config.decoder.layers)

    def empty(repeats: int, length: int, attention: AttentionConfig) -> Cache:
        latent = attention.latent
        if rings and attention.reach is not None:
            length = min(length, bucket(attention.reach))
        if latent is not None:
            lead = (repeats, batch, length)
            own = latent.indexer if latent.has_own_indexer else None
            index = None if own is None else jnp.zeros((*lead, own.head_dim), dtype)
            key = jnp.zeros((*lead, latent.rope_dim), dtype)
            return LatentCache(jnp.zeros((*lead, latent.kv_rank), dtype), key, index)
        shape = (repeats, batch, attention.num_kv_heads, length, attention.head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def begun(repeats: int, recurrence: RecurrentConfig) -> RecurrentCache:
        window, channels, state = recurrence.carried
        inputs = tuple(jnp.zeros((repeats, batch, window, width), dtype) for width in channels)
        return RecurrentCache(inputs, None if state is None else jnp.zeros((repeats, batch, *state), jnp.float32))

    def cache(segment: Segment, layer: LayerConfig) -> Cache:
        if layer.is_recurrent:
            return begun(segment.repeats, layer.recurrence)
        own = empty(segment.repeats, slots, layer.softmax_attention)
        if layer.cross is None or source_slots is None:
            return own
        assert isinstance(own, KVCache), "latent attention goes without cross-attention"
        return own._replace(cross=empty(segment.repeats, source_slots, layer.cross))

    return tuple(
        tuple(cache(segment, layer) for layer in segment.pattern)
        for segment in (segments if stacked else single_layers(segments))
    )


def longest_row(caches: Caches | None) -> int | None:
    """Returns the slots of the longest cache, stacked or not, 0 if none has slots; None without caches."""
    if caches is None:
        return None
    every = (cache for segment in caches for cache in segment if not isinstance(cache, RecurrentCache))
    return max((cache[0].shape[-2] for cache in every), default=0)


def check_caches(
    config: ModelConfig,
    caches: Caches,
    shape: tuple[int, ...],
    positions: Int[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
) -> None:
    """Raises `InputError` unless caches have the rows of [B, T] tokens, and slots for their positions.

    Arguments are those of `Stack`. Inside a program positions that are given are not checked.
    """
    rows = {array.shape[1] for array in jax.tree.leaves(caches)}
    if rows != {shape[0]}:
        made = ", ".join(map(str, sorted(rows)))
        raise InputError(f"the caches are of {made} rows, but the tokens of {shape[0]}: make both for one batch")
    slots = longest_row(caches)
    reaches = [layer.softmax_attention.reach for layer in config.layers if not layer.is_recurrent]
    if not slots or all(reach is not None and reach <= slots for reach in reaches):
        return  # states of recurrences, or rings as long as what is seen
    if positions is not None:
        positions = as_array("positions", positions, "integers", shape)
        valid = None if valid is None else as_array("valid", valid, "booleans", shape)
        if valid is not None:
            if not (_is_at_hand(positions) and _is_at_hand(valid)):
                return
            # NumPy's, so that nothing is compiled for the check.
            positions = cast(Array, np.where(np.asarray(valid), np.asarray(positions), 0))
        check_range("positions", positions, slots, f"positions in caches of {slots} slots")
    elif valid is None and shape[1] > slots:
        raise InputError(f"the caches have {slots} slots, but the rows have {shape[1]} tokens: make more slots")


def _is_at_hand(array: Array) -> bool:
    """Whether all values of an array are known, and to this process."""
    return not is_traced(array) and getattr(array, "is_fully_addressable", True)


def source_slots(caches: Caches | None) -> int | None:
    """Returns how many tokens of the encoder's output the caches have room for; None: they hold nothing of it."""
    every = (cache for segment in caches or () for cache in segment if isinstance(cache, KVCache))
    found = [cache.cross.k.shape[-2] for cache in every if cache.cross is not None]
    return found[0] if found else None


RopeTables = tuple[Float[Array, "B T r"], Float[Array, "B T r"]]
"""Cosines and sines of a rotary embedding."""

FixedContext = tuple[tuple[tuple[RopeConfig, int], ...], bool, bool]
"""The static part of a context: the keys of its rotary tables, whether the rows begin, and whether routing is kept."""


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
      documents: document of every token, for recurrences, counted from 1; 0 is padding. None: a row is one document.
      source: for cross-attention; None: there is none.
      relative_bias: per head and distance, for layers whose attention has one.
      slots: the slots in the caches that the tokens are written to; None: there are no caches.
      keeps_routing: whether what routers decide for every token is asked for.
      at_router: what is asked of the router of the one layer that the context is given to.
      positions: of the tokens in their documents; None: no layer asks for them.
    """

    rope: Mapping[tuple[RopeConfig, int], RopeTables]
    visible: Visibility
    valid: Bool[Array, "B T"] | None = None
    documents: Int[Array, "B T"] | None = None
    source: Source | None = None
    relative_bias: Float[Array, "H n"] | None = None
    slots: Slots | None = None
    keeps_routing: bool = False
    at_router: AtRouter = NOTHING_ASKED
    positions: Int[Array, "B T"] | None = None

    @property
    def fills_cross(self) -> bool:
        """Whether an encoder's output is given, of which cross-attention makes keys and values that caches keep."""
        return self.source is not None and self.source.output is not None

    def split(self) -> tuple["Context", FixedContext]:
        """Splits the context into a pytree of arrays and a hashable rest, which a program takes as two arguments."""
        slots = None if self.slots is None else self.slots._replace(begins=None)
        arrays = self._replace(rope=tuple(self.rope.values()), slots=slots, keeps_routing=None, at_router=None)
        return arrays, (tuple(self.rope), self.slots is not None and self.slots.begins, self.keeps_routing)

    @classmethod
    def joined(cls, arrays: "Context", fixed: FixedContext) -> "Context":
        """Returns the context from the two parts that `split` returned."""
        rotations, begins, keeps_routing = fixed
        slots = None if arrays.slots is None else arrays.slots._replace(begins=begins)
        rope = dict(zip(rotations, arrays.rope, strict=True))
        return arrays._replace(rope=rope, slots=slots, keeps_routing=keeps_routing, at_router=NOTHING_ASKED)


class StackInputs(TypedDict, total=False):
    """Keyword arguments of `Stack`, which explains them, beside its activations."""

    positions: Int[Array, "B T"] | None
    segment_ids: Int[Array, "B T"] | None
    valid: Bool[Array, "B T"] | None
    prefix: Int[Array, " B"] | None
    encoder_output: Float[Array, "B S e"] | None
    encoder_valid: Bool[Array, "B S"] | None
    begins: bool
    routing: bool
    hidden_states: Sequence[int]
    experts_off: Mapping[int, Sequence[int]] | None
    router_bias: Mapping[int, Float[Array, " E"]] | None
    router_logits: Mapping[int, ChangeLogits] | None


def _as_array(name: str, given: Array | None, kind: str, shape: tuple[int | None, ...]) -> Array | None:
    return None if given is None else jnp.asarray(as_array(name, given, kind, shape))


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
    keeps_routing: bool = False,
) -> Context:
    """Makes the context of a pass over [B, T] tokens.

    Args:
      config: of the model.
      shape: batch and length.
      positions, segment_ids, valid, prefix, encoder_output, encoder_valid, begins: as in `Stack`.
      num_slots: of the longest cache; None: there are none.
      num_source_slots: of the caches of cross-attention; None: there are none.
      relative_bias, keeps_routing: see `Context`.

    Raises:
      InputError: if the arguments do not fit each other or the model.
    """
    if encoder_output is not None:
        encoder_output = as_array("encoder_output", encoder_output, "floating-point numbers", (shape[0], None, None))
    source_length = num_source_slots if encoder_output is None else encoder_output.shape[1]
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
    if encoder_output is not None and num_source_slots not in (None, source_length):
        raise InputError(
            f"the caches have slots for {num_source_slots} tokens of an encoder's output, which has {source_length}"
        )
    segment_ids = _as_array("segment_ids", segment_ids, "integers", shape)
    valid = _as_array("valid", valid, "booleans", shape)
    prefix = _as_array("prefix", prefix, "integers", shape[:1])
    positions = _as_array("positions", positions, "integers", shape)
    encoder_valid = _as_array("encoder_valid", encoder_valid, "booleans", (shape[0], source_length))
    length = shape[1] if num_slots is None else num_slots
    if config.bounded_positions and length > config.max_positions:
        raise InputError(
            f"rows of {length} positions, but beyond {config.max_positions} a {config.family!r} model computes "
            "something else, which is not supported; take shorter ones"
        )
    config.check_shared_choice(length)
    in_row = default_positions(shape)
    positions = in_row if positions is None else positions
    # Padding is a document of its own: no text sees it, and it does not make a text longer.
    if segment_ids is None:
        segments = None if valid is None else valid.astype(jnp.int32)
    else:
        segments = segment_ids if valid is None else jnp.where(valid, segment_ids, 0)
        valid = segments > 0
    slots = None
    if num_slots is not None:
        # Padding is written after the last token, where no query looks before the slot is written again.
        last = positions if valid is None else jnp.where(valid, positions, -1)
        slots = Slots(positions, jnp.max(last, axis=1), begins)
    if num_slots is None or begins:
        visible = Visibility(in_row, in_row, segments, segments, prefix)
    else:
        visible = Visibility(positions, positions, prefix=prefix)
    rotating = [layer for layer in config.layers if not layer.is_recurrent]
    rotations = {(config.rope_of(layer), layer.softmax_attention.rope_dim) for layer in rotating}
    limit = config.max_positions
    tables = {(rope, width): rope_tables(rope, width, limit, positions, segments) for rope, width in rotations}
    source = None
    if source_length is not None:
        keys = None if encoder_valid is None else encoder_valid.astype(jnp.int32)
        queries = None if encoder_valid is None else jnp.ones(shape, jnp.int32)
        source = Source(encoder_output, Visibility(in_row, default_positions((shape[0], source_length)), queries, keys))
    asked = positions if any(layer.softmax_attention.needs_positions for layer in rotating) else None
    context = Context(tables, visible, valid, segments, source, relative_bias, slots, keeps_routing)
    return context._replace(positions=asked)
