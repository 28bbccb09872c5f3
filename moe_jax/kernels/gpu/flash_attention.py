"""Attention on NVIDIA GPUs: cuDNN's flash attention, and for packed documents JAX's, which is written in Triton.

cuDNN takes documents only as a bias [B, H, T, S], of the size that the kernels are there to avoid. Triton's kernel
compares documents inside; it has no windows, and needs as many key heads as query heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.hardware import Capability

# Largest width of a head that both take, and the first compute capability, Ampere. cuDNN takes wider heads on Hopper.
MAX_WIDTH, FROM = 128, (8, 0)
DTYPES = (jnp.bfloat16, jnp.float16)
# Rows of documents are padded to a multiple of this.
_BLOCK = 128


def refusal(
    q: Array,
    k: Array,
    v: Array,
    *,
    packed: bool,
    nearest: int | None,
    farthest: int | None,
    soft_cap: float | None,
    capability: Capability | None,
) -> str | None:
    """Returns why no kernel supports attention of these operands; None: one does. Arguments as in `flash_attention`.

    Args:
      packed: whether there are documents.
      capability: of the GPU; None: unknown, and assumed to be new enough.
    """
    width, length = q.shape[-1], q.shape[1]
    if capability is not None and capability < FROM:
        return "the GPU is older than Ampere"
    if q.dtype not in DTYPES:
        return f"activations are {q.dtype.name}, not bfloat16 or float16"
    if soft_cap is not None:
        return "scores are capped"
    if v.shape[-1] != width or width > MAX_WIDTH or width % 8:
        return f"keys are {width} and values {v.shape[-1]} wide, not alike, a multiple of 8 and at most {MAX_WIDTH}"
    if farthest is not None and nearest != 0:
        return "a window reaches to both sides"
    if not packed:
        return None
    if farthest is not None and farthest < length - 1:
        return "rows have documents or padding, and a window"
    return None if k.shape[1] == length else "rows of another length have documents or padding"


def flash_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B S"] | None,
    *,
    nearest: int | None,
    farthest: int | None,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B T H D"]:
    """Softmax attention, in the dtype of `q`, of operands that `refusal` accepts; arguments as `splash_attention`'s."""
    causal, window = nearest == 0, None if farthest is None else (farthest, 0)
    if segments is None:
        options: Any = {"scale": scale, "is_causal": causal, "local_window_size": window}
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)
    from jax.experimental.pallas.ops.gpu import attention as triton

    length, more = q.shape[1], -q.shape[1] % _BLOCK
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    q, k, v = (jnp.pad(a, ((0, 0), (0, more), (0, 0), (0, 0))) for a in (q, k, v))
    # The padding is a document of its own.
    segments = jnp.pad(segments, ((0, 0), (0, more)), constant_values=-1)
    blocks = triton.BlockSizes(
        block_q=_BLOCK, block_k=64, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32
    )
    # The kernels are written for JAX's standard promotion of dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        y: Any = triton.mha(q, k, v, segments, scale, causal, blocks, interpret=interpret)
    return y[:, :length]
