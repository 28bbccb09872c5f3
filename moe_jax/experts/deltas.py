"""What a shared-base bank adds to its base for each expert: parameters under their names, and the form they are in.

One class per kind of delta (METHODS 2.2, 2.3, 4). A delta belongs to one matrix of the FFN and holds all E experts.
"""

import abc
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.experts.config import BankConfig
from moe_jax.experts.csr import check_addressable, columns_dtype
from moe_jax.functional.deltas import DeltaForm, LowRankForm, QuantizedForm, SparseForm
from moe_jax.functional.packing import SCALE_DTYPE, codes_shape, pack, scales_shape


class FixedIntegers(nnx.Variable):
    """Positions of sparse deltas and codes of quantised ones: saved with the model, never trained."""


class Delta(nnx.Module, abc.ABC):
    """The deltas of one matrix; every array is stacked over the experts."""

    def __init__(self, config: BankConfig):
        self.config = config

    def form(self, shape: tuple[int, int]) -> DeltaForm:
        """What the arrays mean for a kernel, or a part of a kernel, of this shape."""
        return delta_form(self.config, shape)

    @abc.abstractmethod
    def specs(self, split: str) -> dict[str, P]:
        """How the arrays lie on the mesh while they are applied.

        Args:
          split: the axis of the kernel that `tensor` splits: `in` or `out`.
        """

    def trained(self) -> dict[str, Array]:
        """Floating-point arrays by name."""
        return _arrays(self, nnx.Param)

    def fixed(self) -> dict[str, Array]:
        """Integer arrays by name."""
        return _arrays(self, FixedIntegers)


class LowRankDelta(Delta):
    """`a` [E, in, r], kaiming uniform with a = sqrt(5) as LoRA draws it, and `b` [E, r, out], zero."""

    def __init__(
        self, config: BankConfig, num_experts: int, shape: tuple[int, int], *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config)
        assert config.rank is not None
        self.a = nnx.Param(draw_a(rngs.params(), num_experts, shape[0], config.rank).astype(dtype))
        self.b = nnx.Param(jnp.zeros((num_experts, config.rank, shape[1]), dtype))

    def specs(self, split: str) -> dict[str, P]:
        if split == "in":
            return {"a": P("expert", "tensor", None), "b": P("expert", None, None)}
        return {"a": P("expert", None, None), "b": P("expert", None, "tensor")}


class SparseDelta(Delta):
    """`values` [E, n], zero at first, at distinct fixed places: CSR, `columns` [E, n] and `row_ends` [E, in]."""

    def __init__(
        self, config: BankConfig, num_experts: int, shape: tuple[int, int], *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config)
        entries = config.nonzeros(shape)
        columns, row_ends = draw_places(rngs.params(), num_experts, shape, entries)
        self.columns, self.row_ends = FixedIntegers(columns), FixedIntegers(row_ends)
        self.values = nnx.Param(jnp.zeros((num_experts, entries), dtype))

    def specs(self, split: str) -> dict[str, P]:
        # Not split over `tensor`: every shard picks its own entries.
        return dict.fromkeys(("columns", "row_ends", "values"), P("expert", None))


class QuantizedDelta(Delta):
    """Packed `codes` [E, bytes, out] uint8 and `scales` [E, groups, out] (or [E, 1, 1]); the delta is zero at first."""

    def __init__(
        self, config: BankConfig, num_experts: int, shape: tuple[int, int], *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config)
        assert config.bits is not None
        # With one bit there is no code for zero; the scales are zero.
        codes = pack(jnp.full(shape, 1 if config.bits == 1 else 0, jnp.int32), config.bits)
        self.codes = FixedIntegers(jnp.broadcast_to(codes, (num_experts, *codes_shape(shape, config.bits))))
        self.scales = nnx.Param(jnp.zeros((num_experts, *scales_shape(shape, config.group_size)), SCALE_DTYPE))

    def specs(self, split: str) -> dict[str, P]:
        if split == "in":
            return {"codes": P("expert", "tensor", None), "scales": P("expert", None, None)}
        per_column = None if self.config.group_size is None else "tensor"
        return {"codes": P("expert", None, "tensor"), "scales": P("expert", None, per_column)}


DELTAS: dict[str, type[Delta]] = {"low-rank": LowRankDelta, "sparse": SparseDelta, "quantized": QuantizedDelta}


def delta_form(config: BankConfig, shape: tuple[int, int]) -> DeltaForm:
    """What the arrays of a delta mean for a kernel, or a part of a kernel, of this shape."""
    if config.kind == "low-rank":
        return LowRankForm(shape)
    if config.kind == "sparse":
        return SparseForm(shape)
    assert config.kind == "quantized" and config.bits is not None, config
    return QuantizedForm(shape, config.bits, config.group_size)


def draw_a(key: Array, num_experts: int, fan_in: int, rank: int) -> Float[Array, "E i r"]:
    """Kaiming uniform with a = sqrt(5): uniform in ±1/sqrt(fan_in); float32."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, (num_experts, fan_in, rank), jnp.float32, -bound, bound)


def draw_places(
    key: Array, num_experts: int, shape: tuple[int, int], entries: int
) -> tuple[Int[Array, "E n"], Int[Array, "E i"]]:
    """Distinct places in a kernel for every expert: columns, and the ends of rows.

    Raises:
      InputError: if a kernel has more entries than int32 can address.
    """
    check_addressable(shape)

    def one(key: Array) -> tuple[Array, Array]:
        # Sorted draws from a range shorter by what is added: distinct, and not a permutation of the whole kernel, which
        # takes seconds. Sets of neighbours are a little less likely than others.
        draws = jax.random.randint(key, (entries,), 0, math.prod(shape) - entries + 1, jnp.int32)
        places = jnp.sort(draws) + jnp.arange(entries, dtype=jnp.int32)
        rows = jnp.arange(shape[0], dtype=jnp.int32)
        row_ends = jnp.searchsorted(places // shape[1], rows, side="right").astype(jnp.int32)
        return (places % shape[1]).astype(columns_dtype(shape)), row_ends

    return jax.lax.map(one, jax.random.split(key, num_experts))


def _arrays(delta: Delta, kind: type[nnx.Variable]) -> dict[str, Array]:
    return {name: variable[...] for name, variable in vars(delta).items() if isinstance(variable, kind)}
