"""Methods that store every expert on its own, in a form in which ResMoE stores residuals (methods.md 4 and 5).

Two of them have codes of their own, as published; neither looks at inputs.

*HQQ* finds zero points by half-quadratic splitting (Badri and Shaji, mobiusml.github.io/hqq_blog, 2023). The scale of a
group is that of its span; its zero point z is to make a norm of the errors small that outliers count little in,
sum |W - W_z|^p with p = 0.7. With the errors E as variables of their own, two steps in turn, each of closed form:

    E = shrink(W - W_z),   shrink(x) = sign(x) max(0, |x| - |x|^(p - 1) / beta)
    z = mean(q - (W - E) / s)

where q are the codes for the z before, s is the distance between levels, W_z = s (q - z), and beta grows by a factor.

*NF4* has the nearest of the levels of normal numbers, by the largest magnitude of a group (Dettmers et al. 2023, QLoRA,
arXiv 2305.14314, section 3). Levels are rounded to bfloat16, as those of every table here are, and scales have the
eight bits of `packing`, not the blocks and levels of the paper.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from moe_jax.compression.coding.coder import ExpertCoder, LeastError
from moe_jax.compression.coding.pruning import mean_shares
from moe_jax.compression.coding.quantizer import nearest_codes, read_grid, stored
from moe_jax.compression.coding.write_experts import write_experts
from moe_jax.compression.linear_maps import LinearMap, usual_codes
from moe_jax.compression.methods.interface import Analysis, Base, Method, Tick, all_alike, check_calibrated
from moe_jax.compression.options.of_kernels import (
    HQQOptions,
    NF4Options,
    PlainQuantizeOptions,
    SVDOptions,
    UnstructuredPruningOptions,
)
from moe_jax.compression.report import NO_BASE, LayerFigures
from moe_jax.compression.source_layer import SourceLayer, Write, aligned_experts, unaligned
from moe_jax.core.code_options import Levels
from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.coding import CodedJointly, Encoded, Layout, MoreOfCodes, Wanted
from moe_jax.functional.codes import LEVELS, SCALE_DTYPE, Grid, scale_leaves, scales_of
from moe_jax.models import LinearCodes, MoEConfig

NORM, BETA, GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20
"""p, beta, its factor, and the number of steps: as published."""


@dataclass(frozen=True, kw_only=True)
class HalfQuadratic(LeastError):
    """Codes with zero points. The published rounds go on as long as the mean error falls."""

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        """Quantises in groups, with zero points and without a table."""
        assert group_size is not None and more.get("zero_points") and not more.get("table")
        made = half_quadratic(values, bits=bits, group_size=group_size, scale_bits=more.get("scale_bits", 16))
        return jax.tree.map(np.asarray, made)


@partial(jax.jit, static_argnames=("bits", "group_size", "scale_bits"))
def half_quadratic(kernel: Float[Array, "i o"], *, bits: int, group_size: int, scale_bits: int = 16) -> Encoded:
    """Quantises a float32 kernel; see `quantizer.quantize`."""
    rows, width = kernel.shape
    padding = -rows % group_size
    groups = jnp.pad(kernel, ((0, padding), (0, 0))).reshape(-1, group_size, width)
    counted = (jnp.arange(rows + padding, dtype=jnp.int32) < rows).reshape(-1, group_size, 1)
    scales, zeros = zero_points(groups, counted, bits=bits)
    grid = read_grid(Grid(scales / 2, None, zeros), bits, scale_bits)
    return stored(nearest_codes(groups, grid, bits), grid, rows, bits, group_size, scale_bits)


def zero_points(
    groups: Float[Array, "g s o"], counted: Array, *, bits: int
) -> tuple[Float[Array, "g 1 o"], Float[Array, "g 1 o"]]:
    """The distances between levels, and the zero points, of float32 groups; `counted` are entries that are there."""
    top = 2**bits - 1
    least = jnp.min(jnp.where(counted, groups, jnp.inf), axis=1, keepdims=True)
    greatest = jnp.max(jnp.where(counted, groups, -jnp.inf), axis=1, keepdims=True)
    # A group of equal entries has no span: one that reaches to zero, which has a level.
    has_span = greatest > least
    least = jnp.where(has_span, least, jnp.minimum(least, 0))
    greatest = jnp.where(has_span, greatest, jnp.maximum(greatest, 0))
    scales = (greatest - least) / top
    unit = jnp.where(scales > 0, scales, 1)
    members = jnp.sum(counted, axis=1, keepdims=True)

    def mean(terms: Array) -> Array:
        return jnp.sum(jnp.where(counted, terms, 0), axis=1, keepdims=True) / members

    def step(state: tuple[Array, Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array, Array], None]:
        zeros, beta, before, falls = state
        codes = jnp.clip(jnp.round(groups / unit + zeros), 0, top)
        errors = groups - unit * (codes - zeros)
        now = jnp.sum(mean(jnp.abs(errors))) / zeros.size
        size = jnp.abs(errors)
        left = size - jnp.where(size > 0, size, 1) ** (NORM - 1) / beta
        shrunk = jnp.sign(errors) * jnp.maximum(left, 0)
        found = mean(codes - (groups - shrunk) / unit)
        # As published, the step in which the error no longer falls is the last one that counts.
        return (jnp.where(falls, found, zeros), beta * GROWTH, now, falls & (now < before)), None

    start = -least / unit, jnp.float32(BETA), jnp.float32(jnp.inf), jnp.bool_(True)
    (zeros, *_), _ = lax.scan(step, start, None, length=ROUNDS)
    return scales, zeros


@dataclass(frozen=True, kw_only=True)
class NormalFloat(LeastError):
    """Codes of four bits with the table of NF4."""

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        """Quantises to four bits in groups, with a table."""
        assert bits == 4 and group_size is not None and more.get("table")
        made = normal_float(values, group_size=group_size, scale_bits=more.get("scale_bits", 16))
        return jax.tree.map(np.asarray, made)


@partial(jax.jit, static_argnames=("group_size", "scale_bits"))
def normal_float(kernel: Float[Array, "i o"], *, group_size: int, scale_bits: int) -> Encoded:
    """Quantises a float32 kernel; see `quantizer.quantize`."""
    rows, width = kernel.shape
    groups = jnp.pad(kernel, ((0, -rows % group_size), (0, 0))).reshape(-1, group_size, width)
    scales = scales_of(scale_leaves(jnp.max(jnp.abs(groups), axis=1), scale_bits))[:, None, :]
    grid = Grid(scales, jnp.asarray(LEVELS).astype(SCALE_DTYPE).astype(jnp.float32))
    return stored(nearest_codes(groups, grid, 4), grid, rows, 4, group_size, scale_bits)


class WithoutBase(Method):
    """The experts themselves in a form; their neurons stay in order.

    Attributes:
      feedback: see `write_experts`.
      levels: see `PlainQuantize`.
      learnt_steps: see `write_experts`.
      coder: that of all kernels, for a method that has one of its own and looks at no inputs.
    """

    feedback: bool = True
    levels: Levels = "any"
    learnt_steps: int | None = None
    origin: ClassVar[str | None] = NO_BASE
    coder: ClassVar[ExpertCoder | None] = None

    @property
    @abc.abstractmethod
    def wanted(self) -> Wanted:
        """How every expert is stored."""

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        if not self.wanted.needs_shares:
            return {}
        nothing = dict.fromkeys(layer.shapes, np.zeros((1, 1), np.float32))
        return {"shares": mean_shares(aligned_experts(layer, unaligned(layer)), nothing, self.wanted.keep or 1.0)}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return all_alike(layers, self.wanted, analyses, base="none")

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        # Neurons stay as they are; matrices that are factored together are read side by side all the same.
        together = isinstance(target.bank.form, CodedJointly)
        measure = write_experts(
            layer,
            target.bank,
            write,
            permutations=unaligned(layer) if together else None,
            feedback=self.feedback,
            even=self.levels == "even",
            coder=self.coder,
            learnt_steps=self.learnt_steps,
        )
        return measure.figures(choice=target.bank.form.describe())


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnstructuredPruning(UnstructuredPruningOptions, WithoutBase):
    """The method with the options `UnstructuredPruningOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = Sparse.layouts()

    @property
    def wanted(self) -> Wanted:
        return Wanted(form=Sparse, keep=self.keep, bits=self.bits, design=self.design)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVD(SVDOptions, WithoutBase):
    """The method with the options `SVDOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = LowRank.layouts()

    @property
    def wanted(self) -> Wanted:
        return Wanted(form=LowRank, keep=self.keep, design=self.design)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainQuantize(PlainQuantizeOptions, WithoutBase):
    """The method with the options `PlainQuantizeOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts()

    def check(self, layers: Sequence[SourceLayer]) -> None:
        if self.learnt_steps is not None:
            check_calibrated(layers)

    @property
    def wanted(self) -> Wanted:
        return Wanted(form=Quantized, **self.codes_options)

    def linear_codes(self, maps: Sequence[LinearMap]) -> dict[str, LinearCodes]:
        # With 4 bits everywhere the embedding loses far more than its share of the bytes (BENCHMARKS.md, whole models).
        usual = 8 if self.bits >= 4 else 4
        bits = {"attention": self.rest_bits or self.bits, "embedding": self.embedding_bits or usual}
        bits |= {"dense": bits["attention"], "head": bits["embedding"]}
        return {one.path: usual_codes(one, bits[one.part], self.codes_options) for one in maps}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HQQ(HQQOptions, WithoutBase):
    """The method with the options `HQQOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts()
    codes_format: ClassVar[Mapping[str, Any]] = {"group_size": 64, "zero_points": True}
    coder: ClassVar[HalfQuadratic] = HalfQuadratic()

    @property
    def wanted(self) -> Wanted:
        given = {"group_size": self.group_size, "scale_bits": self.scale_bits}
        return Wanted(form=Quantized, bits=self.bits, **{**self.codes_format, **given})


@dataclasses.dataclass(frozen=True, kw_only=True)
class NF4(NF4Options, WithoutBase):
    """The method with the options `NF4Options`."""

    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts(bits=4)
    codes_format: ClassVar[Mapping[str, Any]] = {"group_size": 64, "table": True, "scale_bits": 8}
    coder: ClassVar[NormalFloat] = NormalFloat()

    @property
    def wanted(self) -> Wanted:
        return Wanted(form=Quantized, bits=4, **{**self.codes_format, "group_size": self.group_size})
