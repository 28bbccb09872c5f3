"""Optional: a form that experts are compressed to, and what compression gives it and asks it."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypedDict, Unpack, cast

import numpy as np
from jaxtyping import Bool, Float

from moe_jax.core.code_options import DEFAULT_GROUP_SIZE
from moe_jax.core.errors import check_member
from moe_jax.core.form_options import DESIGNS, Design, ResidualOptions
from moe_jax.experts.shapes import FFNConfig, Matrix

if TYPE_CHECKING:
    from moe_jax.experts.forms.protocol import KernelForm

EncodedKernel = tuple[dict[str, np.ndarray], Float[np.ndarray, "i o"]]
"""The leaves of one kernel by name, and the float32 numbers that they stand for."""


class Encoded(NamedTuple):
    """A kernel in codes.

    Attributes:
      leaves: by name, as `packing` describes them: packed codes, their scales, and what else the form has.
      approximation: float32, what they stand for.
    """

    leaves: Mapping[str, Any]
    approximation: Any

    @property
    def codes(self) -> Any:
        """The packed codes among the leaves."""
        return self.leaves["codes"]

    @property
    def scales(self) -> Any:
        """The scales among the leaves."""
        return self.leaves["scales"]


class WholeNumberCodes(NamedTuple):
    """Codes that stand for whole numbers, all matrices alike.

    Attributes:
      bits: of a code.
      group_size: consecutive inputs that share a scale.
      zero_points: whether groups have zero points; without them, levels are those of a grid.
      scale_bits: 16 or 32.
    """

    bits: int
    group_size: int
    zero_points: bool
    scale_bits: int


class MoreOfCodes(TypedDict, total=False):
    """Options of `forms.Quantized` beside bits and groups."""

    table: bool
    scale_bits: int
    zero_points: bool
    row_scales: bool


class Coder(Protocol):
    """The numerical methods with which compression encodes residuals."""

    def factors(self, matrix: Float[np.ndarray, "n w"], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The best approximation `left @ right.T` of a rank: `left` [n, r] and `right` [w, r], float32."""
        ...

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        """Quantises, in the format that the options of `forms.Quantized` describe."""
        ...


class JointCoder(Protocol):
    """The numerical methods with which compression encodes the matrices of an expert together."""

    def factors(
        self, rows: Mapping[str, Float[np.ndarray, "f d"]], rank: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The best approximation `left @ right[name].T` of `rows[name]`: `left` [f, r], `right` [d, r] each, float32.

        Args:
          rows: the matrices of an expert, with a row for every neuron.
          rank: r.
        """
        ...


class Residual(NamedTuple):
    """The difference of one expert from the shared base in one matrix, to be encoded.

    Attributes:
      values: kernel minus base, or the kernel where there is no base; float32 [in, out].
      dtype: of floating-point leaves that have no dtype of their own.
      base: the base as it is stored, float32 [in, out]; None: there is none, or the form adds to it and does not ask.
      kept: mask of the entries to store, `kept_entries` of them; None for forms that store all.
    """

    values: Float[np.ndarray, "i o"]
    dtype: np.dtype
    base: Float[np.ndarray, "i o"] | None = None
    kept: Bool[np.ndarray, "i o"] | None = None


_OF_CODES = ("group_size", "table", "scale_bits", "zero_points", "row_scales")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A form, and how much of the experts is to stay in it. With the shape of the experts it gives the form's options.

        >>> from moe_jax.experts.forms import LowRank
        >>> Wanted(form=LowRank, keep=0.25, design="separate").made(FFNConfig(dim=32), 16, 4)
        LowRank(rank=2)

    Attributes:
      form: the class.
      keep: share of the entries, or of the numbers, that stays, in (0, 1]; None: the form has no such choice.
      bits: of a code, or of an entry that stays; None: floats.
      design: `concat`: one threshold or factorisation for all matrices of an expert; `separate`: one for each.
      encoding: of positions; None: the smallest.
      group_size, table, scale_bits, zero_points, row_scales: of codes, see `forms.Quantized`.

    Raises:
      InputError: if the form has no such size.
    """

    form: "type[Storable]"
    keep: float | None = None
    bits: int | None = None
    design: Design = "concat"
    encoding: str | None = None
    group_size: int | None = DEFAULT_GROUP_SIZE
    table: bool = False
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False

    def __post_init__(self) -> None:
        codes = {name: getattr(self, name) for name in _OF_CODES}
        self.form.check_size(keep=self.keep, bits=self.bits, **codes)
        check_member("design", self.design, DESIGNS)

    @property
    def needs_shares(self) -> bool:
        """Whether `made` depends on where the largest entries are."""
        return self.form.counts_largest and self.design == "concat"

    def made(
        self, expert: FFNConfig, d_model: int, num_experts: int, shares: Sequence[float] | None = None
    ) -> "KernelForm":
        """The form with its options, for experts of a shape.

        Args:
          expert: their FFN.
          d_model: d.
          num_experts: E.
          shares: of each matrix in the entries that stay, if `needs_shares`.
        """
        return self.form.for_share(self, expert, d_model, num_experts, shares)


class Layout(NamedTuple):
    """A way to store experts that has a name: those of `moe-jax plan --compress`.

    Attributes:
      name: such as `csr16`, `svd` or `quantized:4`.
      form: the form of the experts.
      options: fields of `Wanted`.
      position_bytes: of a layout that is only compared with, and never written: bytes of the position of an entry.
      has_row_pointers: whether such a layout has the ends of rows.
    """

    name: str
    form: "type[Storable]"
    options: Mapping[str, Any] = {}
    position_bytes: int | None = None
    has_row_pointers: bool = True

    def has_bits(self, bits: int) -> bool:
        """Whether a code, or an entry that stays, can have so many bits in it."""
        return "bits" in self.form.asks_for and self.options.get("bits", bits) == bits


class Storable(ResidualOptions, abc.ABC):
    """Optional: a form whose size follows from a share or a number of bits.

    Attributes:
      counts_largest: it stores the largest entries, and with the design `concat` as many of a matrix as that has.
      places, row_pointers: names of leaves that say where entries are, and which of these are ends of rows.
    """

    counts_largest: ClassVar[bool] = False
    places: ClassVar[tuple[str, ...]] = ()
    row_pointers: ClassVar[tuple[str, ...]] = ()

    @property
    def whole_numbers(self) -> WholeNumberCodes | None:
        """How experts are whole numbers in groups with a scale each, and nothing else; None of others."""
        return None

    @classmethod
    def layouts(cls, **fixed: Any) -> tuple[Layout, ...]:
        """The named ways to store it, all or those with some fields of `Wanted`; by default one, named as the kind."""
        return tuple(layout for layout in cls._layouts() if fixed.items() <= dict(layout.options).items())

    @classmethod
    def _layouts(cls) -> tuple[Layout, ...]:
        return (Layout(cls.kind, cls),)

    @classmethod
    def sizes_to_try(cls, design: Design) -> tuple[Wanted, ...]:
        """The sizes that are tried under a budget; by default the only one.

        Args:
          design: one threshold or factorisation for all matrices of an expert, or one for each.
        """
        return (Wanted(form=cls),)

    @classmethod
    def for_share(
        cls, wanted: Wanted, expert: FFNConfig, d_model: int, num_experts: int, shares: Sequence[float] | None = None
    ) -> "KernelForm":
        """The form with the options that `wanted` asks for; arguments as of `Wanted.made`. By default it has none."""
        return cast("KernelForm", cls())


class Encodable(Storable):
    """Optional: a form that residuals are encoded in, one matrix of one expert at a time."""

    takes_residuals: ClassVar[bool] = True

    @abc.abstractmethod
    def encode(self, residual: Residual, matrix: Matrix, coder: Coder) -> EncodedKernel:
        """Encodes the residual of one expert: its leaves, and the float32 [in, out] matrix that they add to the base.

        Args:
          residual: of the expert.
          matrix: the matrix.
          coder: the numerical methods to use.
        """

    def kept_entries(self, matrix: Matrix) -> int | None:
        """The number of entries that are stored, while all others are zero; None: the form is not sparse."""
        return None


class CodedJointly(abc.ABC):
    """Optional: the matrices of an expert have leaves in common, and are encoded together.

    A form has the paths of these leaves, below `delta`, in `KernelForm.shared_leaves`.
    """

    @abc.abstractmethod
    def fresh_shared(self, expert: FFNConfig, stack: tuple[int, ...], dtype: Any) -> dict[str, Any]:
        """Initial values of the `shared_leaves`, by path."""

    @classmethod
    @abc.abstractmethod
    def shared_stored_specs(cls) -> dict[str, Any]:
        """How these leaves are stored on a mesh, as `KernelForm.stored_specs` says it of others."""

    @abc.abstractmethod
    def encode_expert(
        self, residuals: Mapping[str, np.ndarray], matrices: Mapping[str, Matrix], dtype: np.dtype, coder: JointCoder
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Encodes all matrices of an expert at once: leaves by path below `delta`, approximations by name."""


def folder_of_part(part: int) -> str:
    """Returns the beginning of the paths of the leaves of a part of the experts, of forms that have parts."""
    return f"part{part}/"


def below(arrays: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Returns the arrays whose paths begin with a folder, by the rest of the path."""
    return {path.removeprefix(folder): array for path, array in arrays.items() if path.startswith(folder)}


class Own(NamedTuple):
    """The place of one expert among the stored arrays of a matrix.

    Attributes:
      form: its own.
      folder: before the names of its arrays; may be empty.
      index: its place in each of them.
    """

    form: "KernelForm"
    folder: str
    index: int

    def arrays(self, every: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of this expert, as its form names them."""
        own, common = below(every, self.folder), self.form.common_leaves
        return {path: array if path in common else array[self.index] for path, array in own.items()}


class ByExpert(abc.ABC):
    """Optional: which form an expert has depends on the expert."""

    @property
    @abc.abstractmethod
    def num_experts(self) -> int:
        """The number of experts that the options describe."""

    @abc.abstractmethod
    def check_count(self, num_experts: int) -> None:
        """Raises `InputError` if the options are those of another number of experts."""

    @abc.abstractmethod
    def of_expert(self, expert: int) -> Own:
        """The form of one expert, and where its arrays are."""

    @abc.abstractmethod
    def experts_with(self, leaf: str) -> list[int]:
        """The experts that have a leaf, in the order in which it has them."""

    def tile(self, base: Any, arrays: Any, window: Any) -> Any:
        """Never asked: tiles are made by the form of their expert."""
        raise NotImplementedError("tiles are made by the form of their expert; see `of_expert`")


def own_of(form: "KernelForm", expert: int) -> Own:
    """The form of one expert of a layer, and where its arrays are."""
    return form.of_expert(expert) if isinstance(form, ByExpert) else Own(form, "", expert)


def experts_with(form: "KernelForm", leaf: str) -> slice | list[int]:
    """The experts that have a leaf, in the order in which it has them."""
    return form.experts_with(leaf) if isinstance(form, ByExpert) else slice(None)
