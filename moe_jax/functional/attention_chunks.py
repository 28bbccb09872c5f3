"""Attention without a kernel: in chunks of queries, with every mask and bias, and of few queries to a cache.

A chunk of queries meets only the keys that it can see. This halves the arithmetic of a causal product, and the scores
stay in the cache of a CPU core. The backward pass recomputes the scores of a chunk instead of keeping them, so memory
grows with the length and not with its square.

Chunks that see different numbers of keys cannot share a loop. Chunks are therefore joined into at most `MAX_BANDS`
bands; one loop runs over the chunks of a band, and each of them meets all the keys that the band sees. So the program
does not grow with the length, and a causal product costs at most 1 / MAX_BANDS more arithmetic than it has to.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.functional.position_embeddings import bias_between

CHUNK = 128
MAX_BANDS = 8


class Visibility(NamedTuple):
    """The arrays from which attention masks are made.

    Attributes:
      positions, key_positions: positions in the row (not in the document); with a cache, slots.
      segments, key_segments: document of every token, which sees its own document only; None: one document a row.
      prefix: length of the prefix of every row, which mask `prefix` lets every query see.
    """

    positions: Int[Array, "B T"]
    key_positions: Int[Array, "B S"]
    segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None
    prefix: Int[Array, " B"] | None = None

    def in_blocks(self, length: int, positions: Int[Array, "B T"], key_positions: Int[Array, "B S"]) -> "Visibility":
        """Returns the same for documents that are cut into blocks of `length` tokens, each of which sees itself only.

        A block is then a document of its own, so that whatever knows documents, as kernels do, knows blocks. The
        positions are those in documents.
        """
        # Of the two numbers that name a block, its own has the room that is left beside the largest of a document. Two
        # blocks whose numbers are then the same are farther apart than a row is long.
        room = jnp.iinfo(jnp.int32).max // (positions.shape[1] + 2)

        def names(positions: Array, documents: Array | None) -> Array:
            number = positions // length
            return number if documents is None else documents * room + number % room

        segments, key_segments = names(positions, self.segments), names(key_positions, self.key_segments)
        return self._replace(segments=segments, key_segments=key_segments)


class AttentionOptions(NamedTuple):
    """The static arguments of `attention.attention`; `scale` is 1/sqrt(D) where it is None there."""

    mask: str
    window: int | None
    scale: float
    soft_cap: float | None
    aligned: bool = False

    def band(self) -> tuple[int | None, int | None]:
        """Returns the least and the largest distance from a query back to a key that it sees; None: any distance."""
        if self.window is None:
            return (0 if self.mask == "causal" else None), None
        return (0 if self.mask == "causal" else 1 - self.window), self.window - 1

    def finished(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns scores, float32, scaled and capped."""
        scores = scores * jnp.float32(self.scale)
        if self.soft_cap is None:
            return scores
        return jnp.tanh(scores / jnp.float32(self.soft_cap)) * jnp.float32(self.soft_cap)


class _Tokens(NamedTuple):
    """Positions and documents of some tokens of a row, and for each of them the length of the row's prefix."""

    positions: Int[Array, " n"]
    segments: Int[Array, " n"] | None
    prefix: Int[Array, " n"] | None


class _Keys(NamedTuple):
    """Keys and values, float32, of one head of a row; biases by distance, and sinks, of the query heads sharing it."""

    k: Float[Array, "s D"]
    v: Float[Array, "s W"]
    tokens: _Tokens
    bias: Float[Array, "G n"] | None
    sinks: Float[Array, " G"] | None


class _Band(NamedTuple):
    """`count` chunks of `size` queries from `start` on, the keys that any of them sees, and how many a chunk needs."""

    start: int
    size: int
    count: int
    first_key: int
    last_key: int
    span: int


def chunked_attention(
    options: AttentionOptions,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K W"],
    visible: Visibility,
    bias: Float[Array, "H n"] | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H W"]:
    """Computes `functional.attention.attention` on any platform."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    if visible.prefix is not None:
        visible = visible._replace(prefix=jnp.broadcast_to(visible.prefix[:, None], (batch, length)))
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)
    # Gradients of keys and values are sums over chunks, which are to be float32 whatever the dtype of the activations.
    k, v = (a.transpose(0, 2, 1, 3).astype(jnp.float32) for a in (k, v))
    if bias is not None:
        bias = bias.reshape(kv_heads, heads // kv_heads, -1)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads)
    one_head = partial(_one_key_head, _bands(length, k.shape[2], options), options)
    on_cpu, elsewhere = partial(_loop_over_heads, one_head), partial(_all_heads_at_once, one_head)
    y = jax.lax.platform_dependent(q, k, v, visible, bias, sinks, cpu=on_cpu, default=elsewhere)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, v.shape[-1])


def _all_heads_at_once(one_head: Callable[..., Array], *arguments: Any) -> Float[Array, "B K G T W"]:
    of_row = jax.vmap(one_head, in_axes=(0, 0, 0, None, 0, 0))
    return jax.vmap(of_row, in_axes=(0, 0, 0, 0, None, None))(*arguments)


def _loop_over_heads(
    one_head, q: Array, k: Array, v: Array, visible: Visibility, bias: Array | None, sinks: Array | None
) -> Float[Array, "B K G T W"]:
    """Loops over key heads: three times faster on XLA:CPU, which has no good kernel for two batch axes."""

    def of_row(row: tuple) -> Array:
        *heads, visible = row
        return jax.lax.map(lambda head: one_head(*head[:3], visible, *head[3:]), (*heads, bias, sinks))

    return jax.lax.map(of_row, (q, k, v, visible))


def _bands(length: int, num_keys: int, options: AttentionOptions) -> list[_Band]:
    """Cuts the queries into bands of whole chunks; queries that do not fill a chunk make a last band."""
    chunks, remainder = divmod(length, CHUNK)
    hides_later = options.aligned and options.mask == "causal"
    reach = options.window - 1 if options.aligned and options.window is not None else None
    # Where every chunk needs the same number of keys from the same range, one band is enough.
    num_bands = MAX_BANDS if hides_later or reach is not None else 1
    cuts = [chunks * i // num_bands for i in range(num_bands + 1)]
    ranges = [(a * CHUNK, CHUNK, b - a) for a, b in zip(cuts[:-1], cuts[1:], strict=True) if b > a]
    if remainder:
        ranges.append((chunks * CHUNK, remainder, 1))

    def band(start: int, size: int, count: int) -> _Band:
        stop = start + size * count
        first_key = 0 if reach is None else max(0, start - reach)
        last_key = stop if hides_later else num_keys if reach is None else min(num_keys, stop + reach)
        seen_by_chunk = num_keys if reach is None else size + reach * (1 if hides_later else 2)
        return _Band(start, size, count, first_key, last_key, min(seen_by_chunk, last_key - first_key))

    return [band(*given) for given in ranges]


def _one_key_head(
    bands: list[_Band],
    options: AttentionOptions,
    q: Array,
    k: Array,
    v: Array,
    visible: Visibility,
    bias: Array | None,
    sinks: Array | None,
) -> Float[Array, "G T W"]:
    """All queries that share a key head, of one row of the batch; keys and values float32."""
    tokens = _Tokens(visible.positions, visible.segments, visible.prefix)
    keys = _Keys(k, v, _Tokens(visible.key_positions, visible.key_segments, None), bias, sinks)
    results = []
    for band in bands:
        one_band = partial(_one_band, band, options)
        # A single chunk also recomputes its slices of the row; with more chunks that would repeat the loop of the band.
        one_band = jax.checkpoint(one_band) if band.count == 1 else one_band
        results.append(one_band(q, tokens, keys))
    return jnp.concatenate(results, axis=1)


def _one_band(
    band: _Band, options: AttentionOptions, q: Float[Array, "G T D"], tokens: _Tokens, keys: _Keys
) -> Float[Array, "G t W"]:
    """Returns the attention of the queries of a band, given all queries and keys of a row."""
    stop = band.start + band.size * band.count
    keys = _cut(keys, lambda a: a[band.first_key : band.last_key])
    tokens = jax.tree.map(lambda a: a[band.start : stop].reshape(band.count, band.size), tokens)
    queries = jnp.moveaxis(q[:, band.start : stop].reshape(q.shape[0], band.count, band.size, -1), 1, 0)
    # The first key that a chunk sees. A span that would begin or end outside the band's keys is moved inside, which
    # changes no result: masks are made of positions.
    firsts = band.start + band.size * jnp.arange(band.count, dtype=jnp.int32) - (options.window or 1) + 1
    firsts = jnp.clip(firsts - band.first_key, 0, band.last_key - band.first_key - band.span)

    def one_chunk(chunk: tuple[Array, _Tokens, Array]) -> Float[Array, "G t W"]:
        return _one_chunk(*chunk, keys, band.span, options)

    if band.count == 1:
        return one_chunk(jax.tree.map(lambda a: a[0], (queries, tokens, firsts)))
    # Inside a loop the compiler cannot merge the recomputed forward pass with the first one.
    recomputed = jax.checkpoint(one_chunk, prevent_cse=False)
    y = jax.lax.map(recomputed, (queries, tokens, firsts))
    return jnp.moveaxis(y, 0, 1).reshape(q.shape[0], stop - band.start, -1)


def _one_chunk(
    q: Float[Array, "G t D"], queries: _Tokens, first: Int[Array, ""], keys: _Keys, span: int, options: AttentionOptions
) -> Float[Array, "G t W"]:
    """Returns the attention of a chunk of queries to `span` keys from `first` on."""
    group, size, width = q.shape
    if span < keys.k.shape[0]:
        keys = _cut(keys, lambda a: jax.lax.dynamic_slice_in_dim(a, first, span, axis=0))
    k, v = keys.k.astype(q.dtype), keys.v.astype(q.dtype)
    scores = jax.lax.dot_general(q.reshape(-1, width), k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scores = options.finished(scores.reshape(group, size, span))
    if keys.bias is not None:
        scores = scores + bias_between(keys.bias, queries.positions, keys.tokens.positions)
    seen = _mask(queries, keys.tokens, options)
    scores = jnp.where(seen[None], scores, jnp.finfo(jnp.float32).min)
    sinks = None if keys.sinks is None else keys.sinks[:, None, None]
    shares = _shares(scores, sinks).astype(v.dtype).reshape(-1, span)
    return (shares @ v).reshape(group, size, v.shape[-1])


def _cut(keys: _Keys, cut: Callable[[Array], Array]) -> _Keys:
    """Applies `cut`, which takes some of the keys, to all arrays of `keys`."""
    k, v, tokens = jax.tree.map(cut, keys[:3])
    return _Keys(k, v, tokens, keys.bias, keys.sinks)


def _shares(scores: Float[Array, "... s"], sinks: Float[Array, "... 1"] | None) -> Float[Array, "... s"]:
    """Returns the softmax of scores, float32. A sink is one more score, whose share is left out."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
    shares = jnp.exp(scores - largest)
    return shares / (jnp.sum(shares, axis=-1, keepdims=True) + jnp.exp(sinks - largest))


def _mask(queries: _Tokens, keys: _Tokens, options: AttentionOptions) -> Bool[Array, "*B t s"]:
    """Returns which keys each query sees."""
    distance = queries.positions[..., :, None] - keys.positions[..., None, :]
    seen = jnp.ones_like(distance, bool) if options.mask == "bidirectional" else distance >= 0
    if options.mask == "prefix":
        assert queries.prefix is not None
        seen |= keys.positions[..., None, :] < queries.prefix[..., :, None]
    if options.window is not None:
        seen &= jnp.abs(distance) < options.window
    if queries.segments is not None:
        assert keys.segments is not None
        seen &= queries.segments[..., :, None] == keys.segments[..., None, :]
    return seen


# More queries at a time belong in `functional.attention`, which takes them in chunks.
MOST_QUERIES = 16


def cached_attention(
    parts: Sequence[tuple[Float[Array, "B T H D"], Float[Array, "B K S D"]]],
    v: Float[Array, "B K S W"],
    visible: Visibility,
    options: AttentionOptions,
    bias: Float[Array, "H n"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    index: "Index | None" = None,
) -> Float[Array, "B T H W"]:
    """Returns softmax attention, as `functional.attention.attention` does, in the dtype of the queries.

    Args:
      parts: pairs of queries and keys, one pair for every array that holds part of the width of the heads; the
        products of the pairs are added up to the scores.
      v: values.
      visible: positions and documents; see `Visibility`.
      options: of the scores.
      bias, sinks: as `attention` takes them.
      index: by which every query chooses the keys that it attends to; None: it attends to all that it sees.
    """
    batch, length, heads, _ = parts[0][0].shape
    kv_heads = v.shape[1]
    group = heads // kv_heads

    def scores_of(q: Array, k: Array) -> Float[Array, "B K m S"]:
        q = q.reshape(batch, length, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
        return _product(q.reshape(batch, kv_heads, group * length, -1), k.astype(q.dtype), contract_keys=False)

    scores = functools.reduce(jnp.add, [scores_of(*part) for part in parts])
    scores = options.finished(scores.reshape(batch, kv_heads, group, length, -1))
    if bias is not None:
        between = jax.vmap(bias_between, in_axes=(None, 0, 0))(bias, visible.positions, visible.key_positions)
        scores = scores + between.reshape(batch, kv_heads, group, length, -1)
    prefix = None if visible.prefix is None else visible.prefix[:, None]
    queries = _Tokens(visible.positions, visible.segments, prefix)
    seen = _mask(queries, _Tokens(visible.key_positions, visible.key_segments, None), options)
    if index is not None:
        seen = seen & chosen_keys(index, seen)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    dtype = parts[0][0].dtype
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
    shares = _shares(scores, sinks).astype(dtype).reshape(batch, kv_heads, group * length, -1)
    y = _product(shares, v.astype(dtype), contract_keys=True).astype(dtype)
    y = y.reshape(batch, kv_heads, group, length, -1).transpose(0, 3, 1, 2, 4)
    return y.reshape(batch, length, heads, -1)


def _product(a: Array, b: Array, *, contract_keys: bool) -> Float[Array, "B K m n"]:
    dimensions = (((3,), (2 if contract_keys else 3,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


# --- keys that an indexer chooses -----------------------------------------------------------------

# Queries of a chunk, each of which has scores of all keys, of its own heads and of the indexer's.
_INDEXED_CHUNK = 32


class Index(NamedTuple):
    """The small heads by whose scores queries choose keys (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    Attributes:
      q: queries of the h small heads, rotated.
      weights: of the heads, for every query; float32.
      keys: one per token for all heads, rotated.
      top_k: number of keys that a query chooses.
    """

    q: Float[Array, "B T h i"]
    weights: Float[Array, "B T h"]
    keys: Float[Array, "B S i"]
    top_k: int


def chosen_keys(index: Index, seen: Bool[Array, "B T S"]) -> Bool[Array, "B T S"]:
    """Returns the keys with the `top_k` largest scores for each query, `sum_h w_h relu(q_h . k)`, of those it sees.

    Of equal scores, those of earlier keys count first. Where a query sees fewer than `top_k`, others are chosen too.
    """
    q, keys = (one.astype(jnp.float32) for one in (index.q, index.keys))
    scores = jax.nn.relu(jnp.einsum("bthi,bsi->bths", q, keys, precision="highest"))
    scores = jnp.einsum("bths,bth->bts", scores, index.weights, precision="highest")
    _, places = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), index.top_k)
    return jnp.put_along_axis(jnp.zeros(seen.shape, bool), places, jnp.asarray(True), axis=-1, inplace=False)


def indexed_attention(
    parts: Sequence[tuple[Float[Array, "B T H D"], Float[Array, "B K S D"]]],
    v: Float[Array, "B K S W"],
    visible: Visibility,
    options: AttentionOptions,
    index: Index,
) -> Float[Array, "B T H W"]:
    """Returns softmax attention of any number of queries to the keys that each of them chooses.

    Args are those of `cached_attention`. The choice has no gradient.
    """
    index = index._replace(**{name: jax.lax.stop_gradient(getattr(index, name)) for name in ("q", "weights", "keys")})
    length = parts[0][0].shape[1]
    if length <= _INDEXED_CHUNK:
        return cached_attention(parts, v, visible, options, index=index)
    keys = [one for _, one in parts]

    def chunked(one: Array) -> Array:
        one = jnp.pad(one, [(0, 0), (0, -length % _INDEXED_CHUNK)] + [(0, 0)] * (one.ndim - 2))
        return jnp.moveaxis(one.reshape(one.shape[0], -1, _INDEXED_CHUNK, *one.shape[2:]), 1, 0)

    def one_chunk(chunk: tuple) -> Float[Array, "B t H W"]:
        queries, q, weights, positions, segments = chunk
        of_chunk = visible._replace(positions=positions, segments=segments)
        chosen = index._replace(q=q, weights=weights)
        return cached_attention(list(zip(queries, keys, strict=True)), v, of_chunk, options, index=chosen)

    queries = [one for one, _ in parts]
    given = jax.tree.map(chunked, (queries, index.q, index.weights, visible.positions, visible.segments))
    y = jax.lax.map(jax.checkpoint(one_chunk, prevent_cse=False), given)
    return jnp.moveaxis(y, 0, 1).reshape(y.shape[1], -1, *y.shape[3:])[:, :length]
