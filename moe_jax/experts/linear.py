"""A linear map that may be frozen as NF4 codes and may have LoRA beside it."""

from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.bank import Weights, normal_kernel
from moe_jax.experts.config import FFNConfig, LoRAConfig
from moe_jax.experts.deltas import draw_a
from moe_jax.experts.nf4_linear import nf4_linear
from moe_jax.functional.adapters import adapter
from moe_jax.functional.dropout import dropout
from moe_jax.functional.ffn import hidden
from moe_jax.functional.keys import fold_in
from moe_jax.functional.linear import linear
from moe_jax.functional.nf4 import dequantize_nf4, quantize_nf4


class NF4Leaf(nnx.Variable):
    """Codes, and the scales that belong to them: saved with the model, never trained, in dtypes of their own."""


class NF4Kernel(nnx.Module):
    """The leaves of `functional.nf4` that a kernel [..., in, out] is kept as; leading axes are stacked."""

    def __init__(self, kernel: Float[Array, "... i o"]):
        for name, leaf in quantize_nf4(kernel).items():
            setattr(self, name, NF4Leaf(leaf))

    def leaves(self) -> dict[str, Array]:
        """By name."""
        return {name: getattr(self, name)[...] for name in ("codes", "scale_codes", "scales", "offset")}


class LoRA(nnx.Module):
    """`a` [..., in, r], drawn as LoRA does, and `b` [..., r, out], zero at first; leading axes are stacked."""

    def __init__(self, config: LoRAConfig, shape: tuple[int, ...], *, rngs: nnx.Rngs, dtype: jnp.dtype):
        *stacked, fan_in, fan_out = shape
        a = draw_a(rngs.params(), stacked[0] if stacked else 1, fan_in, config.rank).astype(dtype)
        self.config = config
        self.a = nnx.Param(a if stacked else a[0])
        self.b = nnx.Param(jnp.zeros((*stacked, config.rank, fan_out), dtype))

    def __call__(self, x: Float[Array, "... i"], key: Array | None) -> Float[Array, "... o"]:
        """`scale * (x A) B`, of factors that are not stacked."""
        x = dropout(x, self.config.dropout, key)
        return adapter(x, self.a[...], self.b[...], "none", self.config.scale)

    def product(self) -> Float[Array, "i o"]:
        """`scale * A B`, float32: for inspection and merging, never on the way of a token."""
        return self.config.scale * (self.a[...].astype(jnp.float32) @ self.b[...].astype(jnp.float32))


def lora_for(config: LoRAConfig | None, name: str) -> LoRAConfig | None:
    """The config where the kernel `name` is among the targets, else None."""
    return config if config is not None and name in config.targets else None


class Linear(Weights):
    """`x W + b`; kernel [in, out], or its NF4 leaves, and `scale * (x A) B` beside it."""

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        bias: bool = False,
        nf4: bool = False,
        lora: LoRAConfig | None = None,
        split: Literal["in", "out"] = "out",
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        """Draws the kernel.

        Args:
          shape: [in, out].
          bias: whether there is one.
          nf4: the kernel is kept as NF4 codes.
          lora: beside the kernel; None: nothing is.
          split: the axis that `tensor` splits, which NF4 needs to know.
          rngs: to draw with.
          dtype: of the parameters.
        """
        kernel = normal_kernel(rngs, shape, dtype)
        super().__init__(None if nf4 else kernel, jnp.zeros(shape[1], dtype) if bias else None)
        self.fan_in, self.split = shape[0], split
        self.has_bias, self.has_lora, self.is_nf4 = bias, lora is not None, nf4
        if nf4:
            self.nf4 = NF4Kernel(kernel)
        if lora is not None:
            self.lora = LoRA(lora, shape, rngs=rngs, dtype=dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the kernel is all there is."""
        return not (self.is_nf4 or self.has_lora)

    def __call__(self, x: Float[Array, "... i"], key: Array | None = None) -> Float[Array, "... o"]:
        """Applies the map; `key` is for LoRA's dropout in training."""
        if self.is_nf4:
            y = nf4_linear(x, self.nf4.leaves(), self.fan_in, self.split)
        else:
            y = linear(x, self.kernel[...])
        if self.has_lora:
            y = y + self.lora(x, key)
        return y + _as_row(self.bias[...].astype(x.dtype), y.ndim) if self.has_bias else y

    def materialise(self) -> Float[Array, "i o"]:
        """The kernel, LoRA included; float32 unless it is plain."""
        if self.is_plain:
            return self.kernel[...]
        if self.is_nf4:
            kernel = dequantize_nf4(self.nf4.leaves(), self.fan_in, jnp.float32)
        else:
            kernel = self.kernel[...].astype(jnp.float32)
        return kernel + self.lora.product() if self.has_lora else kernel


def ffn_linears(
    config: FFNConfig, d_model: int, *, bias: bool, rngs: nnx.Rngs, dtype: jnp.dtype
) -> dict[str, Linear]:
    """The linear maps of an FFN, by name; with `bias` each has one."""
    linears = {}
    for name, shape in config.shapes(d_model).items():
        # `tensor` always splits the axis of the neurons.
        split = "in" if name == "down" else "out"
        lora = lora_for(config.lora, name)
        linears[name] = Linear(shape, bias=bias, nf4=config.nf4, lora=lora, split=split, rngs=rngs, dtype=dtype)
    return linears


def apply_ffn(
    linears: Mapping[str, Linear], x: Float[Array, "... d"], activation: str, key: Array | None
) -> Float[Array, "... d"]:
    """An FFN of `up`, `down`, and `gate` if it is gated; `key` is for LoRA's dropout in training."""

    def project(name: str, x: Array) -> Array:
        return linears[name](x, fold_in(key, ("gate", "up", "down").index(name)))

    gate = project("gate", x) if "gate" in linears else None
    return project("down", hidden(project("up", x), gate, activation))


def _as_row(bias: Float[Array, " o"], ndim: int) -> Array:
    return jnp.expand_dims(bias, tuple(range(ndim - 1)))
