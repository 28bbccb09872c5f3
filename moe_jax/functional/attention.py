"""Grouped-query attention with causal, bidirectional, prefix, sliding-window and packed-document masks.

Kernels are used where they support the case: on TPUs JAX's splash attention (`kernels.tpu.splash_attention`), on NVIDIA
GPUs cuDNN's flash attention and Triton's (`kernels.gpu.flash_attention`). Everything else, and everything on other
platforms, is computed by `chunked_attention`. No array grows with the square of the length.
"""

import logging
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.functional.attention_chunks import AttentionOptions, chunked_attention
from moe_jax.functional.attention_chunks import Visibility as Visibility
from moe_jax.kernels.by_platform import Bound, deferred
from moe_jax.kernels.gpu import flash_attention
from moe_jax.kernels.hardware import compute_capability

logger = logging.getLogger(__name__)

MASKS = ("causal", "bidirectional", "prefix")
PLATFORMS = {"tpu", "gpu"}
"""Platforms that have kernels."""
_LOWERED = {"tpu": "tpu", "gpu": "cuda"}
"""The platforms' names when a program is lowered."""
# For fewer queries, as in decoding, kernels are not worth it.
FEW_QUERIES = 128
# Wider heads would leave splash attention no room in VMEM for its blocks (v5e has 16 MiB for a kernel).
SPLASH_WIDTH = 256


class Placement(NamedTuple):
    """The placement of attention: the platform, and how the mesh in use splits rows and heads.

    Attributes:
      platform: the platform that the program is for.
      batch: axes that split the rows; none: every device has all rows.
      heads: axes that split the heads; none: every device has all heads.
      parts: number of parts into which the axes `heads` split the heads.
      devices: number of devices of the mesh.
      sequence: the one of `heads` that splits the sequences of activations. Devices along it exchange their part of the
        sequence for some heads of the whole sequence, and back. None: activations are of whole sequences.
    """

    platform: str
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    parts: int = 1
    devices: int = 1
    sequence: str | None = None

    def divides_heads(self, heads: int, kv_heads: int) -> bool:
        """Whether every device gets equally many heads; key heads are repeated if they are fewer than parts."""
        return heads % math.lcm(kv_heads, self.parts) == 0


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K W"],
    visible: Visibility,
    *,
    mask: Literal["causal", "bidirectional", "prefix"] = "causal",
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    bias: Float[Array, "H n"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    aligned: bool,
    placement: Placement | None = None,
) -> Float[Array, "B T H W"]:
    """Softmax attention, in the dtype of `q`; scores, their scaling and the softmax are float32.

    Args:
      q, k, v: H is a multiple of K; consecutive query heads share a key head.
      visible: positions and documents.
      mask: `causal`: no key after the query; `bidirectional`: all keys; `prefix`: causal, and the prefix of the row.
      window: a query sees keys fewer than this many positions away, itself included; None: all. Not with `prefix`.
      scale: of the scores; None: 1/sqrt(D).
      soft_cap: scaled scores become `c tanh(scores / c)`; None: no cap.
      bias: added to the scaled and capped scores: per head and distance, from `bias_by_distance`.
      sinks: a score per head, neither scaled nor capped, of a key that every query sees and whose value is zero: it
        takes its share of the softmax, and gives nothing. None: there are none.
      aligned: query t and key s have positions t and s (no cache), so that keys that a mask hides from a whole chunk of
        queries need not be looked at.
      placement: where it runs; None: the platform is found when the program is lowered, and kernels are used only on
        one device.
    """
    assert mask in MASKS and not (mask == "prefix" and window is not None), (mask, window)
    assert mask != "prefix" or visible.prefix is not None, "mask 'prefix' needs the lengths of the prefixes"
    options = AttentionOptions(mask, window, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, soft_cap, aligned)
    platforms = PLATFORMS if placement is None else {placement.platform} & PLATFORMS
    # cuDNN is called through JAX's custom partitioning, which asks for devices while it is traced. So where the
    # platform is found when the program is lowered the kernel is Triton's, as it is for packed documents.
    packed = visible.segments is not None or placement is None
    refusals = {one: _why_no_kernel(one, options, q, k, v, bias, sinks, packed) for one in sorted(platforms)}
    split = placement if placement is not None and placement.sequence is not None else None
    if split is not None and not split.divides_heads(q.shape[2], k.shape[2]):
        options = options._replace(aligned=False)
        refusals = dict.fromkeys(refusals, f"{split.parts} devices cannot share {q.shape[2]} heads evenly")
    if q.shape[1] <= FEW_QUERIES or all(refusals.values()):
        if placement is not None and q.shape[1] > FEW_QUERIES:
            _say_once(placement.platform, refusals.get(placement.platform))
        chunks = partial(chunked_attention, options)
        return (chunks if split is None else _over_devices(chunks, split))(q, k, v, visible, bias, sinks)
    if placement is None:
        return _when_lowered(
            options, tuple(one for one, reason in refusals.items() if reason is None), q, k, v, visible
        )
    kernel = partial(_by_kernel, options=options, platform=placement.platform)
    return _over_devices(kernel, placement)(q, k, v, visible, None, None)


def _by_kernel(
    q: Array,
    k: Array,
    v: Array,
    visible: Visibility,
    bias: None = None,
    sinks: None = None,
    *,
    options: AttentionOptions,
    platform: str,
) -> Float[Array, "B T H W"]:
    """Computes attention with the kernel of a platform, on one device."""
    segments, key_segments = visible.segments, visible.key_segments
    nearest, farthest = options.band()
    given: Any = dict(nearest=nearest, farthest=farthest, scale=options.scale)
    if platform == "tpu":
        from moe_jax.kernels.tpu.splash_attention import splash_attention

        return splash_attention(q, k, v, segments, key_segments, soft_cap=options.soft_cap, **given)
    return flash_attention.flash_attention(q, k, v, segments, key_segments, **given)


def _why_no_kernel(
    platform: str,
    options: AttentionOptions,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
    packed: bool,
) -> str | None:
    """Returns why the kernels of a platform do not support this case; None: they do."""
    if options.mask == "prefix":
        return "of a prefix mask only the data says what is seen"
    if bias is not None:
        return "scores have a bias"
    if sinks is not None:
        return "heads have sinks"
    if not options.aligned and (options.mask != "bidirectional" or options.window is not None):
        return "only the data says at which positions queries are"
    if platform == "tpu":
        wide = max(q.shape[-1], v.shape[-1]) > SPLASH_WIDTH
        return f"heads are wider than {SPLASH_WIDTH}" if wide else None
    nearest, farthest = options.band()
    limits: Any = dict(nearest=nearest, farthest=farthest, soft_cap=options.soft_cap, capability=compute_capability())
    return flash_attention.refusal(q, k, v, packed=packed, **limits)


@lru_cache(maxsize=64)
def _say_once(platform: str, reason: str | None) -> None:
    if reason is not None:
        logger.warning("attention goes without the %s's kernels, which are faster: %s", platform.upper(), reason)


def _over_devices(kernel: Callable[..., Array], placement: Placement) -> Callable[..., Array]:
    """Returns a function that calls the kernel on every device, for its rows and heads.

    Both take `(q, k, v, visible, bias, sinks)`.

    The compiler cannot divide a kernel. Key heads are repeated if there are fewer of them than parts. Where heads
    cannot be divided, every device computes all of them, for its part of the queries if an axis splits sequences.
    """
    if placement.devices == 1:
        return kernel

    def in_place(activations: Array) -> Array:
        """Keeps activations split as they are outside attention; else the compiler would gather their producers."""
        if placement.sequence is None:
            return activations
        heads = P.UNCONSTRAINED
        return jax.lax.with_sharding_constraint(activations, P(placement.batch, placement.sequence, heads, None))

    def whole(q: Array, k: Array, v: Array, visible: Visibility, bias: Array | None, sinks: Array | None) -> Array:
        q, k, v = map(in_place, (q, k, v))
        heads = queries = None
        if placement.divides_heads(q.shape[2], k.shape[2]):
            heads, together = placement.heads, math.lcm(k.shape[2], placement.parts)
            if together > k.shape[2]:
                k, v = (jnp.repeat(a, together // k.shape[2], axis=2) for a in (k, v))
        else:
            queries = placement.sequence
        of_queries, of_keys = P(placement.batch, queries, heads), P(placement.batch, None, heads)
        tokens, key_tokens = P(placement.batch, queries), P(placement.batch, None)
        of_visible = Visibility._make((tokens, key_tokens, tokens, key_tokens, P(placement.batch)))
        specs = (of_queries, of_keys, of_keys, of_visible)
        divided = jax.shard_map(kernel, in_specs=(*specs, P(heads), P(heads)), out_specs=of_queries, check_vma=False)
        return in_place(divided(q, k, v, visible, bias, sinks))

    return whole


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _when_lowered(
    options: AttentionOptions, platforms: tuple[str, ...], q: Array, k: Array, v: Array, visible: Visibility
) -> Float[Array, "B T H W"]:
    """Uses the kernel of the platform that the program is lowered for, if that is one of `platforms` with one device.

    The backward pass computes the forward pass again, because the kernel's rule of differentiation is found only when
    the program is lowered.
    """
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype)
    return _by_platform(platforms, (q, k, v, visible), out, options=options, kernel=_lowered, chunks=_chunked)


def _when_lowered_forward(options: AttentionOptions, platforms: tuple[str, ...], *given: Any) -> tuple[Array, tuple]:
    return _when_lowered(options, platforms, *given), given


def _when_lowered_backward(
    options: AttentionOptions, platforms: tuple[str, ...], given: tuple, cotangent: Array
) -> tuple:
    out = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in given[:3])
    functions: Any = dict(kernel=Bound(_gradients, forward=_lowered), chunks=Bound(_gradients, forward=_chunked))
    return (*_by_platform(platforms, (*given, cotangent), out, options=options, **functions), None)


_when_lowered.defvjp(_when_lowered_forward, _when_lowered_backward)


def _gradients(
    q: Array, k: Array, v: Array, visible: Visibility, cotangent: Array, *, forward: Callable, **options: Any
) -> tuple[Array, Array, Array]:
    return jax.vjp(lambda q, k, v: forward(q, k, v, visible, **options), q, k, v)[1](cotangent)


def _by_platform(
    platforms: tuple[str, ...], given: tuple, out: Any, *, options: AttentionOptions, kernel: Callable, chunks: Callable
) -> Any:
    """Uses the kernel on these platforms; uses chunks on all others, and where the compiler divides the program."""
    by_chunks = Bound(chunks, options=options)
    common: Any = dict(out=out, divided=by_chunks, options=options)
    kernels = {_LOWERED[one]: partial(deferred, kernel, **common, platform=one) for one in platforms}
    return jax.lax.platform_dependent(*given, default=by_chunks, **kernels)


def _lowered(
    q: Array, k: Array, v: Array, visible: Visibility, *, options: AttentionOptions, platform: str
) -> Float[Array, "B T H W"]:
    if platform == "gpu" and visible.segments is None:
        one_document = jnp.zeros(q.shape[:2], jnp.int32)
        visible = visible._replace(segments=one_document, key_segments=one_document)
    return _by_kernel(q, k, v, visible, options=options, platform=platform)


def _chunked(
    q: Array, k: Array, v: Array, visible: Visibility, *, options: AttentionOptions
) -> Float[Array, "B T H W"]:
    return chunked_attention(options, q, k, v, visible)
