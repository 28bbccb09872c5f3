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
from moe_jax.experts.parallel import low_rank_specs
from moe_jax.experts.places import check_addressable, columns_dtype, index_dtype
from moe_jax.functional.deltas import DeltaForm, LowRankForm, QuantizedForm, SparseForm
from moe_jax.functional.packing import SCALE_DTYPE, codes_shape, pack, scales_shape

# Under this name lie the factors over the neurons of joint low-rank deltas.
NEURONS = "neurons"


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
        return low_rank_specs(split)


class JointFactor(nnx.Module):
    """What one matrix, or the neurons, have of the factors of whole experts: `factor` [E, width, r]."""

    def __init__(self, factor: Float[Array, "E w r"]):
        self.factor = nnx.Param(factor)


class JointLowRankDelta:
    """The same as a `Delta`, put together from the factors of a matrix and those over the neurons (METHODS 5).

    Not a module: it holds nothing of its own.
    """

    def __init__(self, name: str, neurons: Float[Array, "E f r"], own: Float[Array, "E d r"]):
        self._factors = joint_factors(name, neurons, own)

    def form(self, shape: tuple[int, int]) -> LowRankForm:
        """See `Delta`."""
        return LowRankForm(shape)

    def specs(self, split: str) -> dict[str, P]:
        """See `Delta`."""
        return low_rank_specs(split)

    def trained(self) -> dict[str, Array]:
        """See `Delta`."""
        return self._factors

    def fixed(self) -> dict[str, Array]:
        """See `Delta`."""
        return {}


def joint_factors(name: str, neurons: Float[Array, "... f r"], own: Float[Array, "... d r"]) -> dict[str, Array]:
    """`a` and `b` of a low-rank kernel `a b` from the factors of a design matrix.

    Rows of the design matrix are neurons: gate and up kernels [d, f] are its transposed parts, down [f, d] is one.
    """
    if name == "down":
        return {"a": neurons, "b": own.swapaxes(-1, -2)}
    return {"a": own, "b": neurons.swapaxes(-1, -2)}


class SparseDelta(Delta):
    """`values` [E, n], zero at first, at distinct fixed places; see `experts.places` for these.

    Quantised values are packed `value_codes` [E, bytes] and `value_scales` [E, groups].
    """

    def __init__(
        self, config: BankConfig, num_experts: int, shape: tuple[int, int], *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config)
        entries = config.nonzeros(shape)
        places = draw_places(rngs.params(), num_experts, shape, entries, config.places)
        for name, array in places.items():
            setattr(self, name, FixedIntegers(array))
        if config.bits is None:
            self.values = nnx.Param(jnp.zeros((num_experts, entries), dtype))
        else:
            codes = pack(jnp.full((entries, 1), 2 ** (config.bits - 1), jnp.int32), config.bits)[:, 0]
            self.value_codes = FixedIntegers(jnp.broadcast_to(codes, (num_experts, *codes.shape)))
            groups = scales_shape((entries, 1), config.group_size)[0]
            self.value_scales = nnx.Param(jnp.zeros((num_experts, groups), SCALE_DTYPE))

    def specs(self, split: str) -> dict[str, P]:
        # Not split over `tensor`: every shard picks its own entries.
        arrays = self.trained() | self.fixed()
        return {name: P("expert", *[None] * (array.ndim - 1)) for name, array in arrays.items()}


class QuantizedDelta(Delta):
    """Packed `codes` [E, bytes, out] uint8 and `scales` [E, groups, out] (or [E, 1, 1]); the delta is zero at first."""

    def __init__(
        self, config: BankConfig, num_experts: int, shape: tuple[int, int], *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config)
        assert config.bits is not None
        # No code stands for zero; the scales are zero.
        codes = pack(jnp.full(shape, 2 ** (config.bits - 1), jnp.int32), config.bits)
        self.codes = FixedIntegers(jnp.broadcast_to(codes, (num_experts, *codes_shape(shape, config.bits))))
        self.scales = nnx.Param(jnp.zeros((num_experts, *scales_shape(shape, config.group_size)), SCALE_DTYPE))

    def specs(self, split: str) -> dict[str, P]:
        if split == "in":
            return {"codes": P("expert", "tensor", None), "scales": P("expert", None, None)}
        per_column = None if self.config.group_size is None else "tensor"
        return {"codes": P("expert", None, "tensor"), "scales": P("expert", None, per_column)}


# Of the kinds with a delta for each matrix of its own.
DELTAS: dict[str, type[Delta]] = {"low-rank": LowRankDelta, "sparse": SparseDelta, "quantized": QuantizedDelta}


def delta_form(config: BankConfig, shape: tuple[int, int]) -> DeltaForm:
    """What the arrays of a delta mean for a kernel, or a part of a kernel, of this shape."""
    if config.kind in ("low-rank", "joint-low-rank"):
        return LowRankForm(shape)
    if config.kind == "sparse":
        return SparseForm(shape, config.places, config.bits, config.group_size)
    assert config.kind == "quantized" and config.bits is not None, config
    return QuantizedForm(shape, config.bits, config.group_size)


def draw_a(key: Array, num_experts: int, fan_in: int, rank: int) -> Float[Array, "E i r"]:
    """Kaiming uniform with a = sqrt(5): uniform in ±1/sqrt(fan_in); float32."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, (num_experts, fan_in, rank), jnp.float32, -bound, bound)


def draw_places(
    key: Array, num_experts: int, shape: tuple[int, int], entries: int, places: str
) -> dict[str, Int[Array, "E ..."]]:
    """Distinct places in a kernel for every expert, in one of the forms of `experts.places`.

    Raises:
      InputError: if a kernel has more entries than int32 can address.
    """
    check_addressable(shape)

    def one(key: Array) -> dict[str, Array]:
        # Sorted draws from a range shorter by what is added: distinct, and not a permutation of the whole kernel, which
        # takes seconds. Sets of neighbours are a little less likely than others.
        draws = jax.random.randint(key, (entries,), 0, math.prod(shape) - entries + 1, jnp.int32)
        positions = jnp.sort(draws) + jnp.arange(entries, dtype=jnp.int32)
        rows, columns = positions // shape[1], positions % shape[1]
        if places == "bitmap":
            byte, bit = columns // 8, (columns % 8).astype(jnp.uint8)
            empty = jnp.zeros((shape[0], -(-shape[1] // 8)), jnp.uint8)
            return {"mask": empty.at[rows, byte].add(jnp.uint8(1) << bit)}
        columns = columns.astype(columns_dtype(shape))
        if places == "coo":
            return {"columns": columns, "rows": rows.astype(index_dtype(shape[0]))}
        every = jnp.arange(shape[0], dtype=jnp.int32)
        return {"columns": columns, "row_ends": jnp.searchsorted(rows, every, side="right").astype(jnp.int32)}

    return jax.lax.map(one, jax.random.split(key, num_experts))


def _arrays(delta: Delta, kind: type[nnx.Variable]) -> dict[str, Array]:
    return {name: variable[...] for name, variable in vars(delta).items() if isinstance(variable, kind)}
