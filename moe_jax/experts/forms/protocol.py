"""The protocol that every form of experts implements.

A *form* says what the experts of a layer are made of: full kernels, a shared base plus low-rank deltas, and so on. It
is a frozen dataclass that holds options (a rank, a number of bits) and behaviour, but neither shapes nor arrays: a
method takes the `Matrix` it is about and, where it computes, the arrays by name. A new form is one file that defines
and registers it (`moe_jax.experts.forms.by_name`). Nothing else asks which form a bank has.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.draws import FRESH
from moe_jax.core.errors import InputError, check_member
from moe_jax.experts.forms.encoded import Coder, JointCoder
from moe_jax.experts.forms.fresh import shapes_of
from moe_jax.experts.forms.matrix import BASE, ORIGIN, Arrays, Load, Matrix, Part, Split, Window, ffn_matrices
from moe_jax.experts.layout.config import FFNConfig
from moe_jax.experts.layout.platforms import Cost, Platform
from moe_jax.functional.products.block_synthesis import InTriton
from moe_jax.functional.products.linear import Product, linear
from moe_jax.functional.products.synthesis import synthesised_matmul
from moe_jax.kernels.tpu.tiles.fused_tile import FusedTile

BASES = ("shared", "none")

Streams = Callable[[int, int], np.random.Generator]
"""`streams(purpose, expert)` is a NumPy generator of its own; the purposes are constants of `moe_jax.core.draws`."""


class Own(NamedTuple):
    """Where one expert is among the stored arrays of a matrix.

    Attributes:
      form: its own.
      folder: before the names of its arrays; may be empty.
      index: its place in each of them.
    """

    form: "KernelForm"
    folder: str
    index: int

    def arrays(self, every: Mapping[str, Any]) -> dict[str, Any]:
        """Those of this expert, as its form names them."""
        own = {path.removeprefix(self.folder): array for path, array in every.items() if path.startswith(self.folder)}
        common = self.form.common_leaves
        return {path: array if path in common else array[self.index] for path, array in own.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertForm(abc.ABC):
    """What the experts of a layer are made of. Subclasses are frozen dataclasses whose fields are its options.

    Attributes:
      kind: the name under which the form is registered.
      over_base: an expert consists of a base that all share and a part of its own; false: its kernels are whole.
      adds_to_base: the expert's own part is added to the base, so that the base can be applied once per token.
      bank: the class of bank that holds such experts; None: `KernelBank`.
      has_expert_kernels: every expert is an FFN, and could be stored as full kernels.
      needs_unit_weights: the weights of a token's experts must sum to 1.
      delta_option: how `upcycle --delta` names the form, such as `low-rank:R`; None: upcycling does not offer it.
      delta_number: name and type of the option that follows the colon there; None: none does.
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
        """Raises `InputError` if the form does not allow this value of `BankConfig.base`."""
        check_member("base", base, BASES)

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:  # noqa: B027
        """Raises `InputError` if the options do not fit matrices of these shapes."""

    def check_count(self, num_experts: int) -> None:  # noqa: B027
        """Raises `InputError` if the options are not those of so many experts."""

    @property
    def beside_base_model(self) -> bool:
        """Whether the experts are adapters on the FFN of a base model, which keeps its own leaves and is frozen."""
        return False

    @property
    def has_codes(self) -> bool:
        """Whether some numbers are stored as packed codes (see `functional.products.packing`)."""
        return False

    @property
    def codes_in_groups(self) -> tuple[int, int] | None:
        """Bits and group size of experts that are codes with a scale per group, and nothing else; None of others."""
        return None

    @property
    def why_not_merged(self) -> str:
        """Why experts `beside_base_model` cannot be merged into it: the verb and its object, as in "are nonlinear"."""
        return "are no kernels"

    def as_part_of_base(self, of_base: bool) -> "ExpertForm":
        """The form with `beside_base_model` false (`of_base`) or true; other forms are returned unchanged."""
        return self

    def describe(self) -> str:
        """The form in words: its kind and the options that differ from their defaults."""
        given = [
            f"{field.name.replace('_', ' ')} {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ", ".join([self.kind, *given])

    @abc.abstractmethod
    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        """How many entries of one expert's own matrices a token is multiplied with; LoRA is not counted."""

    def formula_entries(self, expert: FFNConfig, d_model: int) -> float | None:
        """`multiplied_entries` by a published formula that does not round; None: there is no other formula."""
        return None

    @property
    def includes_base(self) -> bool:
        """Whether `multiplied_entries` includes the base, because base and delta are multiplied as one kernel."""
        return not self.over_base


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelForm(ExpertForm):
    """Experts with a kernel for every matrix of the FFN.

    A form has to define `fresh`, `tile`, `specs` and `stored_specs`. Everything else has a default that is correct for
    every form; a form overrides it to be faster, or to offer something that is optional.

    Attributes:
      couples_matrices: the matrices of an expert are encoded together, by `encode_expert`.
      shared_leaves: paths, below `delta`, of leaves that the matrices of an expert have in common.
      common_leaves: paths of leaves of a matrix that all experts have in common: they lack the axis of experts.
    """

    couples_matrices: ClassVar[bool] = False
    shared_leaves: ClassVar[tuple[str, ...]] = ()
    common_leaves: ClassVar[tuple[str, ...]] = ()

    # ---- what is stored ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """Initial leaves of one matrix, by path. Experts over a base equal their base at first.

        Args:
          rngs: random keys, stream `params`.
          matrix: the matrix.
          stack: leading axes of every leaf but the `common_leaves`: (E,), or () for the kernel of a linear map.
          dtype: of the parameters.
        """

    def fresh_shared(self, expert: FFNConfig, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """Initial values of the `shared_leaves`, by path."""
        return {}

    @classmethod
    @abc.abstractmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """How the stored leaves [E, ...] are sharded, by path; includes every leaf that the form has with any options.

        Unlike in `specs`, the axis `fsdp` may split a leaf, which is then gathered where it is used.

        Args:
          split: the axis of the kernel that `tensor` splits.
        """

    def rounded_specs(self, split: Split) -> dict[str, P]:
        """How those leaves are stored of which only their values in the dtype of the activations are used, by path.

        Over a mesh they are rounded to it before devices along `fsdp` give each other their parts: that is half as
        many bytes.

        Args:
          split: the axis of the kernel that `tensor` splits.
        """
        return {}

    @classmethod
    def shared_stored_specs(cls) -> dict[str, P]:
        """The same for `shared_leaves`."""
        return {}

    def of_matrix(self, matrix: Matrix) -> "KernelForm":
        """The form that the kernels of a matrix have, if those of others may differ; by default this form.

        The methods that take arrays are methods of that form.
        """
        return self

    def of_expert(self, expert: int) -> Own:
        """The form of one expert, and where its arrays are; by default this form."""
        return Own(self, "", expert)

    def count_experts(self, arrays: Mapping[str, Any]) -> int:
        """The number of experts in the stored leaves of a matrix."""
        return next(array for path, array in arrays.items() if path not in self.common_leaves).shape[0]

    def experts_with(self, leaf: str) -> slice | list[int]:
        """The experts that have a leaf, in the order in which it has them; by default all."""
        return slice(None)

    def leaf_names(self, matrix: Matrix) -> tuple[str, ...]:
        """Paths of the leaves of a matrix."""
        return tuple(shapes_of(lambda rngs: self.fresh(rngs, matrix, (1,), jnp.dtype(jnp.float32))))

    def is_trained(self, path: str, array: Array) -> bool:
        """Whether a leaf is a parameter with a gradient; by default every floating-point leaf is."""
        return jnp.issubdtype(array.dtype, jnp.floating)

    def combine(self, matrix: Matrix, own: Arrays, shared: Arrays) -> dict[str, Array]:
        """Makes the arrays of a matrix that the methods below take, from its own leaves and the `shared_leaves`."""
        return dict(own)

    def from_dense(
        self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, num_experts: int, streams: Streams
    ) -> dict[str, np.ndarray]:
        """Leaves, on the host, of experts that all equal a dense kernel, in its dtype.

        Of a form over a base, this kernel is the base. The default takes the leaves from `fresh`.

        Args:
          kernel: of the dense model.
          matrix: the matrix.
          num_experts: E.
          streams: of random numbers.
        """
        key = jax.random.key(int(streams(FRESH, 0).integers(1 << 31)))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            leaves = self.fresh(nnx.Rngs(params=key), matrix, (num_experts,), jnp.dtype(kernel.dtype))
        return {name: np.asarray(leaf) for name, leaf in leaves.items()}

    # ---- what it means ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        """Makes columns of one expert's kernel, float32; must be differentiable in the base and the trained arrays.

        Args:
          base: the same columns of the base, float32; None: there is no base.
          arrays: of one expert. Over a mesh, the part of them that this device holds.
          window: the columns to make.
        """

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile | str:
        """How tiles are made inside a Pallas kernel, which adds them to the base; or in words, why they are not.

        Args:
          shape: [in, out] of the part of the kernels that this device has.
          whole: [in, out] of the kernels.
        """
        return f"nothing says how {self.kind or type(self).__name__} kernels are made inside a Pallas kernel"

    def thin_gradients(
        self,
        lhs: Float[Array, "M i"],
        dout: Float[Array, "M o"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        products: Any,
    ) -> dict[str, Array] | None:
        """The gradients of the trained arrays without those of whole kernels, float32; None: there is no such way.

        Args:
          lhs: rows sorted by expert.
          dout: gradient of the product of the rows with their experts' kernels.
          arrays: stacked over the experts.
          group_sizes: number of rows of every expert.
          products: the grouped products of the platform; see `functional.products.block_synthesis.Products`.
        """
        return None

    def in_triton(self, arrays: Arrays, whole: tuple[int, int], origin: Int[Array, "2"]) -> InTriton | None:
        """How what is added to the base, or else the kernel, is made in a Triton kernel; None: it cannot be.

        Args:
          arrays: stacked over the experts. Over a mesh, the part of them that this device holds.
          whole: [in, out] of a kernel.
          origin: row and column of the kernel where the part begins.
        """
        return None

    def materialise(self, base: Float[Array, "i o"] | None, arrays: Arrays, matrix: Matrix) -> Float[Array, "i o"]:
        """Makes the whole kernel of one expert, in the dtype of the base; float32 if there is none."""
        wide = None if base is None else base.astype(jnp.float32)
        tile = self.tile(wide, arrays, Window.all(matrix.shape))
        return tile if base is None else tile.astype(base.dtype)

    # ---- how it is applied ------------------------------------------------------------------------------------------

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        """Applies the kernel of a linear map, `x W`, in the dtype of `x`.

        Args:
          x: activations.
          arrays: of the kernel, not stacked.
          matrix: the matrix.
          key: random key for dropout in training; None: no dropout.
        """
        return linear(x, self.materialise(None, arrays, matrix))

    def apply_and_add(
        self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None, more: Product
    ) -> Array:
        """`x W` and another product, of the same dtype.

        Args:
          x, arrays, matrix, key: see `apply`.
          more: what is added.
        """
        return self.apply(x, arrays, matrix, key) + linear(*more)

    @abc.abstractmethod
    def specs(self, split: Split) -> dict[str, P]:
        """How the arrays [E, ...] are split inside `shard_map`: over `expert`, and perhaps `tensor`.

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
        """Multiplies every row with the kernel of its expert, in the dtype of the rows.

        Args:
          rows: sorted by expert. Rows beyond the sum of the groups give zeros.
          arrays: stacked over the experts; the base [in, out], if there is one, is the array `BASE`.
          group_sizes: number of rows of every expert.
          matrix: the matrix.
          part: the part of the kernels that the arrays describe; None: the whole kernels.
        """
        base = arrays.get(BASE)
        own = {name: array for name, array in arrays.items() if name != BASE}
        trained = {name: array for name, array in own.items() if self.is_trained(name, array)}
        fixed = {name: array for name, array in own.items() if name not in trained}
        if part is not None:
            fixed[ORIGIN] = jnp.broadcast_to(part.origin[None, :], (group_sizes.shape[0], 2))
        tiles = FormTiles(self, matrix.shape if part is None else part.shape, matrix.shape)
        return synthesised_matmul(rows, base, trained, fixed, group_sizes, tiles)

    def grouped_delta(
        self,
        rows: Float[Array, "M i"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        matrix: Matrix,
        way: str,
        part: Part | None = None,
    ) -> Float[Array, "M o"]:
        """Like `grouped`, but with the deltas alone; only for forms that add to their base.

        Args:
          rows, arrays, group_sizes, matrix, part: see `grouped`; the base is not among the arrays.
          way: one of the keys of `delta_costs`, except `side-by-side`.
        """
        return self.grouped(rows, arrays, group_sizes, matrix, part)

    def factors(self, arrays: Arrays) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
        """The factors `a` and `b` of all deltas `a b`; needed if `side-by-side` is a key of `delta_costs`."""
        raise NotImplementedError

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        """See `ExpertForm`. By default, the entries of whole kernels."""
        return sum(matrix.size for matrix in ffn_matrices(expert, d_model).values())

    @property
    def includes_base(self) -> bool:
        """See `ExpertForm`. By default true, as `multiplied_entries` counts whole kernels."""
        return True

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        """Estimated bytes read for one expert's own part; by default, those of whole kernels.

        Args:
          matrices: of an expert.
          itemsize: bytes of a parameter that is a floating-point number.
        """
        return itemsize * sum(matrix.size for matrix in matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        """Estimated seconds that it takes to make the kernels of one expert; by default, two operations per entry."""
        return platform.products(2.0 * sum(matrix.size for matrix in matrices)).total

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        """The ways to apply the deltas alone, with what each takes; reading the parameters is not included."""
        products = platform.products(2 * load.rows * sum(matrix.size for matrix in matrices))
        return {"grouped": products._replace(making=load.used_experts * self.making(matrices, platform))}

    def cost(
        self,
        matrices: Sequence[Matrix],
        load: Load,
        platform: Platform,
        *,
        based: Sequence[Matrix],
        codes: "KernelForm | None" = None,
    ) -> dict[str, Cost]:
        """The estimated cost of every strategy (`experts.strategy`).

        Args:
          matrices: of an expert.
          load: the numbers of experts and tokens.
          platform: what operations, bytes and entries cost.
          based: those of the matrices that have a base.
          codes: the form of its kernels if they are stored in codes, which are read and unpacked once. For synthesised
            kernels the base is also written in float32, to be read from there.
        """
        size, own = sum(matrix.size for matrix in matrices), self.own_bytes(matrices, platform.itemsize)
        of_base = sum(matrix.size for matrix in based)
        base, used = platform.itemsize * of_base, load.used_experts
        unpacked, written = Cost(0.0), 0
        if codes is not None:
            base, written = codes.own_bytes(based, platform.itemsize), 4 * of_base
            unpacked = Cost(0.0, making=codes.making(based, platform))
        # One kernel of a TPU brings every panel of the base once; elsewhere it is read for every expert.
        bases = 1.0 if platform.chip.platform == "tpu" else used
        made = platform.products(2 * load.rows * size)._replace(making=used * self.making(matrices, platform))
        read = bases * base if codes is None else base + written + bases * written
        costs = {"synthesised": made + platform.reading(read + used * own) + unpacked}
        if self.adds_to_base:
            once = platform.products(2 * load.tokens * of_base)
            once += platform.reading(base + used * own) + unpacked
            ways = self.delta_costs(matrices, load, platform)
            costs |= {f"factored-{way}": once + operations for way, operations in ways.items()}
        return costs

    # ---- how it is encoded ------------------------------------------------------------------------------------------

    def kept_entries(self, matrix: Matrix) -> int | None:
        """The number of entries that are stored, while all others are zero; None: the form is not sparse."""
        return None

    def encode(
        self,
        residual: Float[np.ndarray, "i o"],
        matrix: Matrix,
        dtype: np.dtype,
        coder: Coder,
        kept: Bool[np.ndarray, "i o"] | None = None,
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Encodes the residual of one expert: its leaves, and the float32[in, out] matrix that they stand for.

        Args:
          residual: kernel minus base, or the kernel if there is no base; float32.
          matrix: the matrix.
          dtype: of floating-point leaves that have no dtype of their own.
          coder: the numerical methods to use.
          kept: mask of the entries to store, `kept_entries` of them; None for forms that are not sparse.

        Raises:
          InputError: if this form cannot be made by compression.
        """
        raise InputError(f"{self.kind} experts cannot be made by compression")

    def encode_expert(
        self,
        residuals: Mapping[str, Float[np.ndarray, "i o"]],
        matrices: Mapping[str, Matrix],
        dtype: np.dtype,
        coder: JointCoder,
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Like `encode`, for all matrices of an expert at once; leaves by path below `delta`, approximations by name.

        Only for forms that couple the matrices.
        """
        raise InputError(f"{self.kind} experts cannot be made by compression")


@dataclasses.dataclass(frozen=True)
class FormTiles:
    """A form together with the shapes of a matrix: the `Tiles` that `functional.products.synthesis` takes.

    Attributes:
      form: makes the tiles. An array `origin` [2] among the arrays says where a part begins.
      shape: [in, out] of the part of the kernel, or of the kernel.
      whole: [in, out] of the kernel.
    """

    form: KernelForm
    shape: tuple[int, int]
    whole: tuple[int, int]

    @property
    def adds_to_base(self) -> bool:
        """See `functional.products.synthesis.Tiles`."""
        return self.form.adds_to_base

    def thin_gradients(
        self, lhs: Array, dout: Array, arrays: Arrays, group_sizes: Array, products: Any
    ) -> dict[str, Array] | None:
        """See `functional.products.synthesis.Tiles`."""
        own = {name: array for name, array in arrays.items() if name != ORIGIN}
        return self.form.thin_gradients(lhs, dout, own, group_sizes, products)

    def in_triton(self, arrays: Arrays) -> InTriton | None:
        """See `functional.products.synthesis.Tiles`."""
        own = {name: array for name, array in arrays.items() if name != ORIGIN}
        # It is the same for all experts.
        origin = arrays[ORIGIN][0] if ORIGIN in arrays else jnp.zeros(2, jnp.int32)
        return self.form.in_triton(own, self.whole, origin)

    def tile(
        self, base: Float[Array, "i w"] | None, arrays: Arrays, start: Int[Array, ""] | int, width: int
    ) -> Float[Array, "i w"]:
        """See `functional.products.synthesis.Tiles`."""
        own = {name: array for name, array in arrays.items() if name != ORIGIN}
        window = Window(self.shape, self.whole, arrays.get(ORIGIN), start, width)
        return self.form.tile(base, own, window)

    def fused(self) -> FusedTile | str:
        """See `functional.products.synthesis.Tiles`."""
        return self.form.fused_tile(self.shape, self.whole)
