"""Relative position bias (T5): a learned number per head, added to a score by the distance from query to key."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError, check_positive

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
