"""The matrix products of a model, alone: what XLA and PyTorch make of the same ones on the same machine.

How fast a whole model can be beside another library's depends on the products that the two are built on. Their ratio
is what the products allow.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch

from moe_jax.models import FFNConfig, ModelConfig, MoEConfig

MOST_OUTPUT = 64 << 20
"""Bytes of the largest output that is made at once; larger products are made in parts, as models make them."""


class Product(NamedTuple):
    """`batch` products of [rows, width] and [width, columns], in float32."""

    batch: int
    rows: int
    width: int
    columns: int

    @property
    def flops(self) -> int:
        return 2 * math.prod(self)


def products_of(config: ModelConfig, rows: int, length: int) -> Counter[Product]:
    """The products of a forward pass, with how often each is made.

    The rows of an MoE are spread evenly over its experts. Scores of attention are counted whole.

    Args:
      config: of a decoder with gated feed-forward layers.
      rows: of the batch.
      length: tokens of a row.
    """
    tokens, found = rows * length, Counter[Product]()
    for layer in config.layers:
        attention = layer.attention
        heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
        found[Product(1, tokens, config.d_model, heads * width)] += 1
        found[Product(1, tokens, config.d_model, kv_heads * width)] += 2
        found[Product(1, tokens, heads * width, config.d_model)] += 1
        if length > 1:
            found[Product(rows * heads, length, width, length)] += 1
            found[Product(rows * heads, length, length, width)] += 1
        mlp = layer.mlp
        experts, ffn, used = (mlp.num_experts, mlp.expert, mlp.top_k) if isinstance(mlp, MoEConfig) else (1, mlp, 1)
        assert isinstance(ffn, FFNConfig)
        found[Product(1, tokens * used // experts, config.d_model, ffn.dim)] += 2 * experts
        found[Product(1, tokens * used // experts, ffn.dim, config.d_model)] += experts
    parts = -(-4 * tokens * config.vocab_size // MOST_OUTPUT)
    found[Product(1, -(-tokens // parts), config.d_model, config.vocab_size)] += parts
    return found


def in_xla(product: Product, *, training: bool) -> Callable[[], object]:
    """Makes a product, and in training those of its two gradients, by XLA."""
    batch, rows, width, columns = product
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((batch, rows, width), (batch, width, columns), (batch, rows, columns))
    x, kernel, gradient = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    # Of a batch of one, as models write them: without the axis.
    x, kernel, gradient = (a[0] if batch == 1 else a for a in (x, kernel, gradient))

    def run(x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        if not training:
            return (x @ kernel,)
        return x @ kernel, gradient @ jnp.swapaxes(kernel, -1, -2), jnp.swapaxes(x, -1, -2) @ gradient

    compiled = jax.jit(run).lower(x, kernel, gradient).compile()
    return lambda: jax.block_until_ready(compiled(x, kernel, gradient))


def in_torch(product: Product, *, training: bool) -> Callable[[], object]:
    """The same by PyTorch, which keeps the kernels of its linear maps the other way round."""
    batch, rows, width, columns = product
    lead = () if batch == 1 else (batch,)
    x, gradient = torch.randn(*lead, rows, width), torch.randn(*lead, rows, columns)
    kernel = torch.randn(*lead, columns, width)

    def run() -> object:
        with torch.no_grad():
            if not training:
                return (x @ kernel.mT,)
            return x @ kernel.mT, gradient @ kernel, gradient.mT @ x

    return run
