"""Position embeddings: rotary ones (Su et al., 2021) with their published scalings, and relative biases (T5).

Also the factors of queries that grow with positions, which keep attention to long texts sharp.

Rotary embeddings have the half-split layout, as in most Hugging Face checkpoints: dimension i is rotated with dimension
i + r/2. In the interleaved layout (DeepSeek-V2) it is rotated with its neighbour.
"""

import dataclasses
import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError, check_member, check_number, check_positive, is_finite
from moe_jax.core.formatting import short_repr

ROPE_SCALINGS = ("none", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its published scalings.

        >>> moe_jax.RopeConfig(theta=500_000.0).scaling
        'none'

    Attributes:
      theta: base of the frequencies.
      fraction: share of each head that is rotated, its first dimensions: 1 in Llama; 0: none are.
      scaling: one of `ROPE_SCALINGS`; the fields below belong to some of them.
      factor: stretch of the context (linear, dynamic, yarn, llama3, longrope).
      original_max_positions: context length before stretching.
      attention_factor: multiplies cos and sin (yarn, longrope); None: the published formula.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
      low_freq_factor, high_freq_factor: llama3.
      short_factor, long_factor: longrope, one number per rotated pair.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    scaling: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3"] = "none"
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_member("rope scaling", self.scaling, ROPE_SCALINGS)
        check_number(self, "theta", "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", above=0)
        check_number(self, "fraction", "mscale", "mscale_all_dim", "high_freq_factor", at_least=0)
        check_positive(self, "original_max_positions")
        if self.fraction > 1.0:
            raise InputError(f"rope fraction={self.fraction} must lie in [0, 1]: it is the share that is rotated")
        if self.scaling == "yarn" and self.theta <= 1.0:
            raise InputError(f"rope theta={self.theta} must be above 1: scaling 'yarn' divides by its logarithm")
        if self.scaling == "llama3" and self.high_freq_factor < self.low_freq_factor:
            raise InputError(
                f"rope high_freq_factor={self.high_freq_factor} is below low_freq_factor={self.low_freq_factor}"
            )
        if self.scaling == "longrope":
            self._check_longrope()

    def check_fits(self, head_dim: int, max_positions: int) -> None:
        """Raises `InputError` unless heads of this width can be rotated so, in a model of this context length."""
        rotated = rotated_width(self, head_dim)
        if self.scaling == "dynamic" and rotated == 2:
            raise InputError("rope scaling 'dynamic' needs more than one pair of dimensions that is rotated")
        if self.scaling == "longrope" and (self.original_max_positions or max_positions) < 2:
            raise InputError("rope scaling 'longrope' needs original_max_positions of at least 2")
        for factors in (self.short_factor, self.long_factor):
            if self.scaling == "longrope" and factors is not None and len(factors) != rotated // 2:
                raise InputError(f"rope has {len(factors)} factors, expected {rotated // 2}, one per rotated pair")

    def _check_longrope(self) -> None:
        if self.short_factor is None or self.long_factor is None:
            raise InputError("rope scaling 'longrope' needs short_factor and long_factor")
        if not all(is_finite(factor) and factor > 0 for factor in (*self.short_factor, *self.long_factor)):
            raise InputError("rope short_factor and long_factor must be finite numbers above 0")


def rotated_width(rope: RopeConfig, head_dim: int) -> int:
    """Returns the number of dimensions of a head that are rotated; it is even."""
    return int(head_dim * rope.fraction) // 2 * 2


def rope_tables(
    rope: RopeConfig,
    head_dim: int,
    max_positions: int,
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T r"], Float[Array, "B T r"]]:
    """Returns cosines and sines, float32, for the first `r = 2 * (rotated pairs)` dimensions of a head.

    With `dynamic` and `longrope` the frequencies depend on the length of the text that a token belongs to: on the
    largest position in its own document, never on other texts in the row or in the batch. Keys in a cache keep the
    rotation that they were written with.

    Args:
      rope: theta and scaling.
      head_dim: width of a head; `rope.fraction` of it is rotated.
      max_positions: context length of the config, with which lengths of texts are compared.
      positions: position of every token.
      segments: document of every token, in [0, T]; padding, which belongs to no document, has a number of its own.
        None: every row is one document without padding.
    """
    rotated = rotated_width(rope, head_dim)
    frequencies, scale = _frequencies(rope, rotated, max_positions, positions, segments)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T r"], sin: Float[Array, "B T r"], *, interleaved: bool = False
) -> Float[Array, "B T H D"]:
    """Rotates the first r dimensions of every head, in float32; the others pass through.

    Dimensions of an interleaved layout come out in the half-split layout. Done to queries and keys alike, this changes
    no score.
    """
    r = cos.shape[-1]
    if r == 0:
        return x
    turned = x[..., :r].astype(jnp.float32)
    if interleaved:
        turned = turned.reshape(*turned.shape[:-1], r // 2, 2).swapaxes(-1, -2).reshape(turned.shape)
    first, second = turned[..., : r // 2], turned[..., r // 2 :]
    swapped = jnp.concatenate([-second, first], axis=-1)
    turned = (turned * cos[:, :, None, :] + swapped * sin[:, :, None, :]).astype(x.dtype)
    return turned if r == x.shape[-1] else jnp.concatenate([turned, x[..., r:]], axis=-1)


def _frequencies(
    rope: RopeConfig, rotated: int, max_positions: int, positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None
) -> tuple[Float[Array, "_ _ p"], Float[Array, ""]]:
    """Returns the inverse frequencies of the r/2 pairs, and the factor of cosines and sines."""
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(max(1, rotated))
    plain = (1.0 / rope.theta**exponents).astype(np.float32)
    original = rope.original_max_positions or max_positions
    scale = 1.0
    if rope.scaling == "dynamic":
        frequencies = _dynamic(rope, rotated, max_positions, _lengths(positions, segments))
    elif rope.scaling == "longrope":
        frequencies, scale = _longrope(rope, plain, original, _lengths(positions, segments))
    else:
        if rope.scaling == "linear":
            plain = plain / np.float32(rope.factor)
        elif rope.scaling == "llama3":
            plain = _llama3(rope, plain, original)
        elif rope.scaling == "yarn":
            plain, scale = _yarn(rope, plain, rotated, original), _yarn_scale(rope)
        frequencies = jnp.asarray(plain)[None, None, :]
    return frequencies, jnp.float32(scale)


def _lengths(positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B N 1"]:
    """Returns the length of each token's document: its largest position plus one. N is T, or 1 for whole rows."""
    if segments is None:
        last = jnp.max(positions, axis=1, keepdims=True)
    else:
        longest = partial(jax.ops.segment_max, num_segments=positions.shape[1] + 1)
        last = jnp.take_along_axis(jax.vmap(longest)(positions, segments), segments, axis=1)
    return last.astype(jnp.float32)[..., None] + 1.0


def _dynamic(
    rope: RopeConfig, rotated: int, max_positions: int, lengths: Float[Array, "B N 1"]
) -> Float[Array, "B N p"]:
    """NTK-aware base that grows with the text once it is longer than the trained context."""
    lengths = jnp.maximum(lengths, float(max_positions))
    base = rope.theta * ((rope.factor * lengths / max_positions) - (rope.factor - 1.0)) ** (rotated / (rotated - 2))
    exponents = jnp.arange(0, rotated, 2, dtype=jnp.float32) / float(rotated)
    return 1.0 / jnp.power(base, exponents[None, None, :])


def _llama3(rope: RopeConfig, plain: np.ndarray, original: int) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended (none are, in Llama 4)."""
    wavelength = 2 * math.pi / plain
    if rope.low_freq_factor == rope.high_freq_factor:
        stretched = wavelength > original / rope.low_freq_factor
        return np.where(stretched, plain / rope.factor, plain).astype(np.float32)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = np.where(wavelength > original / rope.low_freq_factor, plain / rope.factor, plain)
    between = (wavelength <= original / rope.low_freq_factor) & (wavelength >= original / rope.high_freq_factor)
    return np.where(between, blended, stretched).astype(np.float32)


def _yarn(rope: RopeConfig, plain: np.ndarray, rotated: int, original: int) -> np.ndarray:
    """YaRN (Peng et al., 2023): a ramp over the dimensions from kept to stretched frequencies."""

    def dimension(rotations: float) -> float:
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rotated // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope(
    rope: RopeConfig, plain: np.ndarray, original: int, lengths: Float[Array, "B N 1"]
) -> tuple[Float[Array, "B N p"], float]:
    """LongRoPE (Ding et al., 2024): one factor per pair, another set for texts beyond the original context."""
    short = jnp.asarray(plain / np.asarray(rope.short_factor, np.float32))[None, None, :]
    long = jnp.asarray(plain / np.asarray(rope.long_factor, np.float32))[None, None, :]
    frequencies = jnp.where(lengths > original, long, short)
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    return frequencies, 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))


# The computed biases have a row for every distance up to the largest, so the distance needs a bound.
MAX_DISTANCE = 65_536


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBiasConfig:
    """A learned bias per head and bucket of distances: short distances have their own buckets, longer ones share.

        >>> moe_jax.RelativeBiasConfig().buckets
        32

    Attributes:
      buckets: number of buckets; half of them are for keys after the query, where the mask lets a query see such keys.
      max_distance: from here on all distances share one bucket.
    """

    buckets: int = 32
    max_distance: int = 128

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "buckets")
        check_positive(self, "max_distance", at_most=MAX_DISTANCE)

    def check_fits(self, mask: str) -> None:
        """Raises `InputError` unless distances can be divided into this many buckets under this mask."""
        exact = self._one_sided(mask) // 2
        if exact < 1:
            raise InputError(f"relative bias: buckets={self.buckets} are too few for a {mask} mask")
        if self.max_distance <= exact:
            raise InputError(
                f"relative bias: max_distance={self.max_distance} must be above {exact}, the distances that have a "
                "bucket each"
            )

    def bucket_of_distance(self, mask: Literal["causal", "bidirectional", "prefix"]) -> Int[np.ndarray, " n"]:
        """Returns the bucket of every distance `key position - query position` from -max_distance to max_distance.

        On each side, the first half of the buckets stand for one distance each, the others for ranges that grow
        logarithmically. With a causal mask, keys after the query, which no query sees, have bucket 0.
        """
        count = self._one_sided(mask)
        exact = count // 2
        distances = np.arange(self.max_distance + 1)
        # In float32, with each step rounded on its own: a boundary that is a whole number must come out exact.
        ratio = np.maximum(distances, 1).astype(np.float32) / np.float32(exact)
        logarithm = np.log(ratio.astype(np.float64)).astype(np.float32)
        whole = np.log(np.float64(self.max_distance / exact)).astype(np.float32)
        beyond = exact + (logarithm / whole * np.float32(count - exact)).astype(np.int64)
        before = np.where(distances < exact, distances, np.minimum(beyond, count - 1))
        after = before + count if mask != "causal" else np.zeros_like(before)
        return np.concatenate([before[::-1], after[1:]]).astype(np.int32)

    def _one_sided(self, mask: str) -> int:
        return self.buckets if mask == "causal" else self.buckets // 2


def bias_by_distance(
    table: Float[Array, "b H"], config: RelativeBiasConfig, mask: Literal["causal", "bidirectional", "prefix"]
) -> Float[Array, "H n"]:
    """Returns the bias of every distance from -max_distance to max_distance, float32, as `attention` takes it.

    Args:
      table: bias per bucket and head.
      config: how distances are divided.
      mask: of the attention.
    """
    return jnp.take(table.astype(jnp.float32), config.bucket_of_distance(mask), axis=0).T


def bias_between(
    by_distance: Float[Array, "G n"], positions: Int[Array, " t"], key_positions: Int[Array, " s"]
) -> Float[Array, "G t s"]:
    """Returns the bias between some queries and keys; `by_distance` is from `bias_by_distance`, for some heads."""
    farthest = by_distance.shape[1] // 2
    distance = key_positions[None, :] - positions[:, None]
    return jnp.take(by_distance, jnp.clip(distance, -farthest, farthest) + farthest, axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScaleConfig:
    """A factor of queries that grows with their position, in steps (Llama 4 and Mistral 4; arXiv 2501.19399).

        >>> moe_jax.QueryScaleConfig(coefficient=0.1, length=8192).from_one
        False

    Attributes:
      coefficient: the factor at position p is `1 + coefficient log(1 + floor(p / length))`.
      length: positions of a step.
      from_one: positions are counted from 1 here, and not from 0.
    """

    coefficient: float
    length: int
    from_one: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_number(self, "coefficient", at_least=0)
        check_positive(self, "length")


def scaled_queries(
    q: Float[Array, "B T H D"], config: QueryScaleConfig, positions: Int[Array, "B T"]
) -> Float[Array, "B T H D"]:
    """Returns queries times the factor of their positions, which is float32, in their dtype."""
    steps = ((positions + int(config.from_one)) // config.length).astype(jnp.float32)
    factors = 1.0 + jnp.float32(config.coefficient) * jnp.log1p(steps)
    return (q.astype(jnp.float32) * factors[..., None, None]).astype(q.dtype)
