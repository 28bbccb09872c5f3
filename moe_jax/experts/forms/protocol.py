"""The one protocol for what the experts of a layer are made of.

A *form* is a frozen dataclass that is both its options (a rank, a number of bits) and its behaviour. It knows neither
shapes nor arrays: a method takes the `Matrix` it is about and, where it computes, the arrays by name. A new form is one
file that defines and registers it (`moe_jax.experts.forms.by_name`); nothing else asks which form there is.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_jax.draws import FRESH
from moe_jax.errors import InputError, check_member
from moe_jax.experts.config import FFNConfig
from moe_jax.experts.forms.matrix import BASE, Arrays, Load, Matrix, Part, Split, Window, ffn_matrices
from moe_jax.experts.platforms import BYTES_PER_ENTRY, Platform
from moe_jax.functional.linear import linear
from moe_jax.functional.synthesis import synthesised_matmul


class Encoded(NamedTuple):
    """Numbers as codes and scales (see `functional.packing`), and what these stand for, float32."""

    codes: np.ndarray
    scales: np.ndarray
    approximation: np.ndarray


class Coder(Protocol):
    """The numerical methods by which compression makes the leaves of a form."""

    def factors(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """`left` [n, r] and `right` [w, r], float32, of the nearest `left @ right.T`."""
        ...

    def quantize(self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None) -> Encoded:
        """Codes with the scales of least squared error, one for `group_size` rows of a column, or for all entries."""
        ...


BASES = ("shared", "none")

Streams = Callable[[int, int], np.random.Generator]
"""`streams(purpose, expert)`: a stream of random numbers on the host. Purposes are those of `moe_jax.draws`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertForm(abc.ABC):
    """What experts are made of: the options of a kind of bank. Subclasses are frozen dataclasses.

    Attributes:
      kind: the name that it is registered under.
      over_base: an expert is made of a base, which all share, and something of its own; else its kernels are whole.
      adds_to_base: what an expert has of its own is added to what the base gives, which can be applied on its own.
      bank: its own class of bank; None: `KernelBank`, for experts that are kernels.
      has_expert_kernels: every expert is an FFN of its own, which could be stored as full kernels.
      needs_unit_weights: the weights of a token's experts have to sum to 1.
      delta_option: how `upcycle --delta` names it, such as `low-rank:R`; None: a dense model does not become this.
      delta_number: name and type of the option that the number after the colon is.
    """

    kind: ClassVar[str] = ""
    over_base: ClassVar[bool] = True
    adds_to_base: ClassVar[bool] = True
    bank: ClassVar[type | None] = None
    has_expert_kernels: ClassVar[bool] = True
    needs_unit_weights: ClassVar[bool] = False
    delta_option: ClassVar[str | None] = None
    delta_number: ClassVar[tuple[str, type] | None] = None

    def check_base(self, base: str) -> None:
        """Raises `InputError` where the form does not go with this choice of `BankConfig.base`."""
        check_member("base", base, BASES)

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:  # noqa: B027
        """Raises `InputError` where the options make no sense for experts of these shapes."""

    @property
    def beside_base_model(self) -> bool:
        """Whether the experts stand after the FFN of a model of its own, which goes on as it was and is frozen."""
        return False

    @property
    def has_codes(self) -> bool:
        """Whether numbers are stored as codes (see `functional.packing`)."""
        return False

    @property
    def why_not_merged(self) -> str:
        """Why experts that stand `beside_base_model` cannot become part of it: what follows "which"."""
        return "stand beside the model"

    def as_part_of_base(self, of_base: bool) -> "ExpertForm":
        """The same form, for which `beside_base_model` is true or not, where it can be true at all."""
        return self

    def describe(self) -> str:
        """The form in words: its kind and the options that were given."""
        given = [
            f"{field.name.replace('_', ' ')} {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ", ".join([self.kind, *given])

    @abc.abstractmethod
    def multiplied(self, expert: FFNConfig, d_model: int) -> int:
        """Entries of one expert's own matrices that a token is multiplied with, LoRA left out."""

    def unrounded(self, expert: FFNConfig, d_model: int) -> float | None:
        """Entries of an expert's own as a formula in real numbers counts them; None: as stored."""
        return None

    @property
    def includes_base(self) -> bool:
        """Whether `multiplied` counts products with the base already: base and delta are multiplied as one kernel."""
        return not self.over_base


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelForm(ExpertForm):
    """Experts that are kernels, one for every matrix of the FFN.

    What has to be said: `fresh`, `tile`, `specs` and `stored_specs`. All else has a default that is right for every
    form; overriding it makes something faster or possible.

    Attributes:
      couples_matrices: the matrices of an expert are encoded together (`encode_expert`).
      shared_leaves: paths, below `delta`, of what all matrices of an expert have in common.
    """

    couples_matrices: ClassVar[bool] = False
    shared_leaves: ClassVar[tuple[str, ...]] = ()

    # ---- what is stored ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """Newly initialised leaves of one matrix by path. Deltas are zero, where they can be.

        Args:
          rngs: random keys, stream `params`.
          matrix: which.
          stack: (E,), leading axes of every leaf; () for the one kernel of a linear map.
          dtype: of the parameters.
        """

    def fresh_shared(self, expert: FFNConfig, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """Newly initialised leaves at the paths `shared_leaves`."""
        return {}

    @classmethod
    @abc.abstractmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """How stored leaves [E, ...] lie on the mesh, by path, of every leaf that the form may have under any options.

        `fsdp` may split them as well; they are gathered where they are used.

        Args:
          split: the axis of the kernel that `tensor` splits.
        """

    @classmethod
    def shared_stored_specs(cls) -> dict[str, P]:
        """The same for `shared_leaves`."""
        return {}

    def leaf_names(self, matrix: Matrix) -> tuple[str, ...]:
        """Paths of the leaves of a matrix."""
        return tuple(nnx.eval_shape(lambda: self.fresh(nnx.Rngs(0), matrix, (1,), jnp.dtype(jnp.float32))))

    def is_trained(self, path: str, array: Array) -> bool:
        """Whether a leaf of the form is a parameter, which has a gradient; by default all that are no integers."""
        return jnp.issubdtype(array.dtype, jnp.floating)

    def combine(self, matrix: Matrix, own: Arrays, shared: Arrays) -> dict[str, Array]:
        """The arrays that the methods below are given for a matrix, from its own leaves and `shared_leaves`."""
        return dict(own)

    def from_dense(
        self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, num_experts: int, streams: Streams
    ) -> dict[str, np.ndarray]:
        """Leaves on the host, in the dtype of a dense kernel, of experts that are all this kernel, which is their base.

        This default is for forms whose fresh experts are their base.

        Args:
          kernel: of the dense model.
          matrix: which.
          num_experts: E.
          streams: for what is random.
        """
        key = jax.random.key(int(streams(FRESH, 0).integers(1 << 31)))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            leaves = self.fresh(nnx.Rngs(params=key), matrix, (num_experts,), jnp.dtype(kernel.dtype))
        return {name: np.asarray(leaf) for name, leaf in leaves.items()}

    # ---- what it means ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        """Columns of the kernel of one expert, float32, differentiable in the base and all trained arrays.

        Args:
          base: the same columns of the base, float32; None: there is none.
          arrays: of one expert; of a part, split as `specs` says.
          window: which columns.
        """

    def materialise(self, base: Float[Array, "i o"] | None, arrays: Arrays, matrix: Matrix) -> Float[Array, "i o"]:
        """The whole kernel of one expert, in the dtype of the base; float32 without one."""
        wide = None if base is None else base.astype(jnp.float32)
        tile = self.tile(wide, arrays, Window.all(matrix.shape))
        return tile if base is None else tile.astype(base.dtype)

    # ---- how it is applied ------------------------------------------------------------------------------------------

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        """`x W` with the one kernel of a linear map, in the dtype of `x`.

        Args:
          x: activations.
          arrays: of the kernel, not stacked.
          matrix: which.
          key: for what is random in training (dropout); None: nothing is.
        """
        return linear(x, self.materialise(None, arrays, matrix))

    @abc.abstractmethod
    def specs(self, split: Split) -> dict[str, P]:
        """How the arrays [E, ...] lie on the mesh while they are applied: `expert` and `tensor` split them.

        Args:
          split: the axis of the kernel that `tensor` splits.
        """

    def grouped(
        self,
        rows: Float[Array, "M i"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        matrix: Matrix,
        part: Part | None = None,
    ) -> Float[Array, "M o"]:
        """Rows sorted by expert times their expert's kernel, in the dtype of the rows.

        Args:
          rows: rows beyond the sum of the groups give zeros.
          arrays: stacked over the experts, and the base [in, out] as `BASE` where there is one.
          group_sizes: rows of every expert.
          matrix: which.
          part: what the arrays are of the kernels; None: all.
        """
        base = arrays.get(BASE)
        own = {name: array for name, array in arrays.items() if name != BASE}
        trained = {name: array for name, array in own.items() if self.is_trained(name, array)}
        fixed = {name: array for name, array in own.items() if name not in trained}
        if part is not None:
            fixed[_ORIGIN] = jnp.broadcast_to(part.origin[None, :], (group_sizes.shape[0], 2))
        tiles = FormTiles(self, matrix.shape if part is None else part.shape, matrix.shape)
        return synthesised_matmul(rows, base, trained, fixed, group_sizes, tiles)

    def grouped_delta(
        self, rows: Float[Array, "M i"], arrays: Arrays, group_sizes: Int[Array, " E"], matrix: Matrix, way: str
    ) -> Float[Array, "M o"]:
        """The same with the deltas alone, of a form that adds to its base.

        Args:
          rows, arrays, group_sizes, matrix: see `grouped`; the arrays have no base.
          way: one of those that `delta_costs` names, and not `side-by-side`.
        """
        return self.grouped(rows, arrays, group_sizes, matrix)

    def factors(self, arrays: Arrays) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
        """`a` and `b` of all experts, of a form whose deltas are products `a b`: one with the way `side-by-side`."""
        raise NotImplementedError

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def multiplied(self, expert: FFNConfig, d_model: int) -> int:
        """Entries of one expert's own matrices that a token is multiplied with; by default those of whole kernels."""
        return sum(matrix.size for matrix in ffn_matrices(expert, d_model).values())

    @property
    def includes_base(self) -> bool:
        """See `ExpertForm`. By default true: what is multiplied is a whole kernel."""
        return True

    def own_bytes(self, matrices: Sequence[Matrix]) -> float:
        """Bytes that are read of one expert's own, roughly; by default those of whole kernels."""
        return BYTES_PER_ENTRY * sum(matrix.size for matrix in matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        """Operations to make the kernels of one expert, roughly; by default two for each entry."""
        return 2.0 * sum(matrix.size for matrix in matrices)

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, float]:
        """Ways to apply deltas alone, of a form that adds to its base: their operations, without what is read."""
        size = sum(matrix.size for matrix in matrices)
        return {"grouped": 2 * load.rows * size + load.used_experts * self.making(matrices, platform)}

    def cost(
        self, matrices: Sequence[Matrix], load: Load, platform: Platform, *, has_base: bool
    ) -> dict[str, float]:
        """Operations, with bytes converted to operations, of every exact way to apply experts over a base.

        Args:
          matrices: of an expert.
          load: how much there is to do.
          platform: what it is done on.
          has_base: whether there is a base, or the deltas are all.
        """
        size, own = sum(matrix.size for matrix in matrices), self.own_bytes(matrices)
        base, used = (BYTES_PER_ENTRY * size if has_base else 0), load.used_experts
        made = 2 * load.rows * size + used * self.making(matrices, platform)
        costs = {"synthesised": made + platform.operations_per_byte * used * (base + own)}
        if self.adds_to_base:
            once = 2 * load.tokens * size if has_base else 0
            once += platform.operations_per_byte * (base + used * own)
            ways = self.delta_costs(matrices, load, platform)
            costs |= {f"factored-{way}": once + operations for way, operations in ways.items()}
        return costs

    # ---- how it is encoded ------------------------------------------------------------------------------------------

    def kept_entries(self, matrix: Matrix) -> int | None:
        """How many entries of a residual are stored one by one and all others left out; None: not such a form."""
        return None

    def encode(
        self,
        residual: Float[np.ndarray, "i o"],
        matrix: Matrix,
        dtype: np.dtype,
        coder: Coder,
        kept: Bool[np.ndarray, "i o"] | None = None,
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The leaves that store what one expert adds to its base, and what these stand for, float32[in, out].

        Args:
          residual: float32; without a base the kernel itself.
          matrix: which.
          dtype: of floating-point leaves that have no dtype of their own.
          coder: the numerical methods.
          kept: the `kept_entries`, where the form has them.

        Raises:
          InputError: if compression does not make this form.
        """
        raise InputError(f"{self.kind} experts are not made by compression")

    def encode_expert(
        self,
        residuals: Mapping[str, Float[np.ndarray, "i o"]],
        matrices: Mapping[str, Matrix],
        dtype: np.dtype,
        coder: Coder,
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The same for all matrices of an expert at once, of a form that couples them; paths are below `delta`."""
        raise InputError(f"{self.kind} experts are not made by compression")


_ORIGIN = "origin"


@dataclasses.dataclass(frozen=True)
class FormTiles:
    """A form with shapes, which then makes tiles for `functional.synthesis` (see `Tiles` there).

    Attributes:
      form: what the arrays mean; the array `origin` [2] among them says where a part begins.
      shape: [in, out] of the kernel, or of the part of it.
      whole: [in, out] of the kernel.
    """

    form: KernelForm
    shape: tuple[int, int]
    whole: tuple[int, int]

    def tile(
        self, base: Float[Array, "i w"] | None, arrays: Arrays, start: Int[Array, ""] | int, width: int
    ) -> Float[Array, "i w"]:
        """Columns start ... start + width of the kernel, or of the part, of one expert."""
        own = {name: array for name, array in arrays.items() if name != _ORIGIN}
        window = Window(self.shape, self.whole, arrays.get(_ORIGIN), start, width)
        return self.form.tile(base, own, window)
