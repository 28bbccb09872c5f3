"""Attention on TPUs, by JAX's splash kernels: what a mask hides is neither read nor computed, block by block.

Nothing grows with the square of the length: a mask is a band of distances between query and key, which is computed
inside the kernel, and documents are compared there. On the host a mask has an entry per block. Blocks grow with the
length, so there are at most 128 x 128 of them up to 131,072 tokens. The program has the same size for every length;
making and compiling it takes one to two times as long for 131,072 tokens as for 8192.

The result is that of `grouped_query`, rounded in other places: the kernel does not scale scores, so queries are scaled
and rounded (exactly, where the scale is a power of two), and the probabilities are not rounded before they meet the
values.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as splash_mask_info
from jaxtyping import Array, Float, Int

from moe_jax.kernels.by_platform import PRODUCT


def splash_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K W"],
    segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B S"] | None,
    *,
    nearest: int | None,
    farthest: int | None,
    scale: float,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H W"]:
    """Returns softmax attention, in the dtype of `q`, of queries and keys at positions 0, 1, ...; differentiable.

    Args:
      q, k, v: H is a multiple of K; consecutive query heads share a key head.
      segments, key_segments: documents, at least 0; a query sees keys of its own. None: there is one.
      nearest: a query sees keys at least this many positions before it (0: itself, negative: after it); None: all.
      farthest: and at most this many positions before it; None: all.
      scale: of the scores.
      soft_cap: scaled scores become `c tanh(scores / c)`; None: no cap.
      interpret: run without a TPU, step by step.
    """
    length, keys = q.shape[1], k.shape[1]
    row = max(q.shape[-1], v.shape[-1]) * q.dtype.itemsize
    blocks = _block(length, row), _block(keys, row)
    q = (q.astype(jnp.float32) * jnp.float32(scale)).astype(q.dtype)
    padded, padded_keys = -(-length // blocks[0]) * blocks[0], -(-keys // blocks[1]) * blocks[1]
    # Keys added as padding need to be hidden only where a query would see that far after itself.
    if segments is None and padded_keys > keys and (nearest is None or length - 1 - nearest >= keys):
        segments, key_segments = (jnp.zeros(a.shape[:2], jnp.int32) for a in (q, k))
    lengths = padded, padded_keys, padded_keys
    heads_first = [_padded(a, size).transpose(0, 2, 1, 3) for a, size in zip((q, k, v), lengths, strict=True)]
    documents = None
    if segments is not None:
        assert key_segments is not None
        documents = splash.SegmentIds(
            *(_padded(a, size, fill=-1) for a, size in ((segments, padded), (key_segments, padded_keys)))
        )
    mask = _Band((padded, padded_keys), nearest, farthest)
    kernel = _kernel(mask, q.shape[2], blocks, soft_cap, interpret)
    # The kernels are written for JAX's standard promotion of dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        y: Any = jax.vmap(kernel)(*heads_first, documents)
    return y.transpose(0, 2, 1, 3)[:, :length]


def _block(length: int, row_bytes: int) -> int:
    """Returns the queries, or keys, of a block: large for long rows, small where the row then needs little padding."""
    # The largest blocks, with which a mask of 131,072 tokens takes a second and not ten, need room for their rows in
    # VMEM.
    for block, shortest, widest in ((1024, 32_769, 512), (512, 2048, None), (256, 512, None)):
        if length >= shortest and (widest is None or row_bytes <= widest):
            return block
    return 128


def _padded(a: Array, length: int, fill: int = 0) -> Array:
    more = [(0, length - a.shape[1] if axis == 1 else 0) for axis in range(a.ndim)]
    return jnp.pad(a, more, constant_values=fill) if length > a.shape[1] else a


@dataclasses.dataclass(frozen=True)
class _IsInside:
    """Whether a query at one position sees a key at another; runs inside the kernel."""

    nearest: int | None
    farthest: int | None

    def __call__(self, queries: Any, keys: Any) -> Any:
        distance = queries - keys
        if self.farthest is None:
            return distance >= self.nearest
        if self.nearest is None:
            return distance <= self.farthest
        return (distance >= self.nearest) & (distance <= self.farthest)


class _Band(splash_masks.Mask):
    """The mask that shows all distances in a range.

    The library asks of every block whether any of its entries is seen and whether all are. The range of distances in
    the block answers both; looking at all entries would take minutes for 131,072 tokens.
    """

    def __init__(self, shape: tuple[int, int], nearest: int | None, farthest: int | None):
        self._shape = shape
        self.range = nearest, farthest
        if self.range != (None, None):
            # With these two attributes the kernel computes the mask and does not read it.
            self.q_sequence = np.arange(shape[0], dtype=np.int32)
            self.mask_function = _IsInside(nearest, farthest)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """Returns two entries in place of those of a block: their `any` and `all` equal the block's."""
        queries, keys = block
        least, most = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
        nearest, farthest = self.range
        low, high = least if nearest is None else nearest, most if farthest is None else farthest
        return np.array([[least <= high and most >= low, least >= low and most <= high]])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Band) and (self._shape, self.range) == (other._shape, other.range)

    def __hash__(self) -> int:
        return hash((self._shape, self.range))


@functools.lru_cache(maxsize=64)
def _kernel(
    mask: _Band, heads: int, blocks: tuple[int, int], soft_cap: float | None, interpret: bool
) -> splash.SplashAttentionKernel:
    """Returns the kernel, with its table of blocks; cached, as it is the same for all layers of a model."""
    of_queries, of_keys = blocks
    at_once = min(of_keys, 512)
    sizes = splash.BlockSizes(
        block_q=of_queries, block_kv=of_keys, block_kv_compute=at_once,
        block_q_dkv=of_queries, block_kv_dkv=of_keys, block_kv_dkv_compute=at_once,
        block_q_dq=of_queries, block_kv_dq=of_keys,
    )  # fmt: skip
    # `make_splash_mha` does the same with arrays on a device, which a program for absent hardware does not have.
    heads_mask = splash_masks.MultiHeadMask([mask] * heads)
    shards = dict(head_shards=1, q_seq_shards=1)
    info, inside = splash_mask_info.process_mask(heads_mask, blocks, **shards)
    info_of_keys, _ = splash_mask_info.process_mask_dkv(heads_mask, blocks, **shards)
    options: Any = {"is_mqa": False, "save_residuals": False, "mask_value": splash.DEFAULT_MASK_VALUE}
    options |= {"attn_logits_soft_cap": soft_cap, "residual_checkpoint_name": PRODUCT, "mask_function": inside}
    return splash.SplashAttentionKernel(info, info, info_of_keys, block_sizes=sizes, interpret=interpret, **options)
