"""The protocol that every form of experts implements, and the registry in which a form is found by its name.

A *form* says what the experts of a layer are made of: full kernels, a shared base plus low-rank deltas, and so on. It
is a frozen dataclass that holds options (a rank, a number of bits) and behaviour, but neither shapes nor arrays: a
method takes the `Matrix` it is about and, where it computes, the arrays by name. A new form is one file that defines
and registers it. Nothing else asks which form a bank has.

A form of kernels has four methods: `fresh`, `tile`, `specs` and `stored_specs`. What else it can do is a class of
`coding` or `optional` that it inherits: being compressed to, tiles inside the kernels of an accelerator,
costs of its own, a cheaper way to multiply.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core.draws import FRESH
from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.core.form_options import FORM_OPTIONS, FormOptions, delta_options, read_delta
from moe_jax.core.formatting import count_bytes
from moe_jax.core.registry import Registry
from moe_jax.experts.forms.coding import CodedJointly
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.experts.shapes import (
    BASE,
    ORIGIN,
    Arrays,
    FFNConfig,
    GroupSizes,
    Matrix,
    Part,
    Rows,
    Split,
    Window,
    ffn_matrices,
    shapes_of,
)
from moe_jax.functional.dense import linear
from moe_jax.functional.synthesis import synthesised_matmul

BASES = ("shared", "none")

Streams = Callable[[int, int], np.random.Generator]
"""`streams(purpose, expert)` is a NumPy generator of its own; the purposes are constants of `moe_jax.core.draws`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertForm(FormOptions, abc.ABC):
    """A form of the experts of a layer. Subclasses are frozen dataclasses whose fields are its options.

    Attributes:
      allowed_bases: the values of `BankConfig.base` that the form allows.
      adds_to_base: the expert's own part is added to the base, so that the base can be applied once per token.
      bank: the class of bank that holds such experts; None: `KernelBank`.
      has_expert_kernels: every expert is an FFN, and could be stored as full kernels.
      needs_unit_weights: the weights of a token's experts must sum to 1.
      includes_base: `multiplied_entries` includes the base, because base and delta are multiplied as one kernel.
    """

    allowed_bases: ClassVar[tuple[str, ...]] = BASES
    adds_to_base: ClassVar[bool] = True
    bank: ClassVar[type | None] = None
    has_expert_kernels: ClassVar[bool] = True
    needs_unit_weights: ClassVar[bool] = False
    includes_base: ClassVar[bool] = False

    def check_base(self, base: str) -> None:
        """Raises `InputError` if the form does not allow this value of `BankConfig.base`."""
        check_member("base", base, BASES)

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:  # noqa: B027
        """Raises `InputError` if the options do not fit matrices of these shapes."""

    @property
    def beside_base_model(self) -> bool:
        """Whether the experts are adapters on the FFN of a base model, which keeps its own leaves and is frozen."""
        return False

    @property
    def has_codes(self) -> bool:
        """Whether some numbers are stored as packed codes (see `functional.codes`)."""
        return False

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
        """The number of entries of one expert's own matrices that a token is multiplied with; LoRA is not counted."""


class BesideBase(abc.ABC):
    """Optional: the experts are adapters on a base model, or part of it (`ExpertForm.beside_base_model`)."""

    @property
    @abc.abstractmethod
    def why_not_merged(self) -> str:
        """Why such experts cannot be merged into the base model: the verb and its object, as in "are nonlinear"."""

    @abc.abstractmethod
    def as_part_of_base(self, of_base: bool) -> Self:
        """The form with `beside_base_model` false (`of_base`) or true."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelForm(ExpertForm):
    """Experts with a kernel for every matrix of the FFN.

    A form has to define `fresh`, `tile`, `specs` and `stored_specs`. The rest follows from these, and is right for
    every form; a form overrides it to be faster, or where its leaves differ between matrices.

    Attributes:
      shared_leaves: paths, below `delta`, of leaves that the matrices of an expert have in common (`CodedJointly`).
      common_leaves: paths of leaves of a matrix that all experts have in common: they lack the axis of experts.
      rounded_leaves: paths of leaves of which only the values in the dtype of the activations are used. Over a mesh
        they are rounded to it before devices along `fsdp` give each other their parts: half as many bytes.
    """

    includes_base: ClassVar[bool] = True
    shared_leaves: ClassVar[tuple[str, ...]] = ()
    common_leaves: ClassVar[tuple[str, ...]] = ()
    rounded_leaves: ClassVar[tuple[str, ...]] = ()

    @property
    def bits_of_codes(self) -> int | None:
        """Bits of a code, if kernels are codes with a scale for each group; None: they are not."""
        return None

    # ---- the four ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """Initial leaves of one matrix, by path. Experts over a base equal their base at first.

        Args:
          rngs: random keys, stream `params`.
          matrix: the matrix.
          stack: leading axes of every leaf but the `common_leaves`: (E,), or () for the kernel of a linear map.
          dtype: of the parameters.
        """

    @abc.abstractmethod
    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        """Makes columns of one expert's kernel, float32; must be differentiable in the base and the trained arrays.

        Args:
          base: the same columns of the base, float32; None: there is no base.
          arrays: of one expert. Over a mesh, the part of them that this device holds.
          window: the columns to make.
        """

    @abc.abstractmethod
    def specs(self, split: Split) -> dict[str, P]:
        """How the arrays [E, ...] are split inside `shard_map`: over `expert`, and perhaps `tensor`.

        Args:
          split: the axis of the kernel that `tensor` splits.
        """

    @classmethod
    @abc.abstractmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """How the stored leaves [E, ...] are sharded, by path; includes every leaf that the form has with any options.

        Unlike in `specs`, the axis `fsdp` may split a leaf, which is then gathered where it is used.
        """

    # ---- what is stored ---------------------------------------------------------------------------------------------

    def of_matrix(self, matrix: Matrix) -> "KernelForm":
        """The form that the kernels of a matrix have, if those of others may differ; by default this form.

        The methods that take arrays are methods of that form.
        """
        return self

    def leaf_names(self, matrix: Matrix) -> tuple[str, ...]:
        """Paths of the leaves of a matrix."""
        return tuple(self.leaves(matrix, (1,), jnp.dtype(jnp.float32)))

    def leaves(self, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Any]:
        """`jax.ShapeDtypeStruct`s of the leaves of a matrix, by path; arguments as of `fresh`."""
        return shapes_of(lambda rngs: self.fresh(rngs, matrix, stack, dtype))

    def bytes(self, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> int:
        """The number of bytes of these leaves."""
        return count_bytes(self.leaves(matrix, stack, dtype).values())

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

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        """By default, the entries of whole kernels."""
        return sum(matrix.size for matrix in ffn_matrices(expert, d_model).values())

    # ---- how it is applied ------------------------------------------------------------------------------------------

    def materialise(self, base: Float[Array, "i o"] | None, arrays: Arrays, matrix: Matrix) -> Float[Array, "i o"]:
        """Makes the whole kernel of one expert, in the dtype of the base; float32 if there is none."""
        wide = None if base is None else base.astype(jnp.float32)
        tile = self.tile(wide, arrays, Window.all(matrix.shape))
        return tile if base is None else tile.astype(base.dtype)

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        """Applies the kernel of a linear map, `x W`, in the dtype of `x`.

        Args:
          x: activations.
          arrays: of the kernel, not stacked.
          matrix: the matrix.
          key: random key for dropout in training; None: no dropout.
        """
        return linear(x, self.materialise(None, arrays, matrix))

    def grouped(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, part: Part | None = None
    ) -> Rows:
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


_FORMS: Registry[type[ExpertForm]] = Registry("form", {})
_Form = TypeVar("_Form", bound=ExpertForm)
_SPLITS: tuple[Split, ...] = ("out", "in")


def register(kind: str) -> Callable[[type[_Form]], type[_Form]]:
    """Registers the decorated form, so that `BankConfig(kind=kind, ...)` has it.

    The name is best the import path of the form; see `Registry`. A class that is defined anew takes its own place.

    Raises:
      ValueError: if the name is taken, or if another form has a leaf of the same name that is sharded differently.
    """

    def add(form: type[_Form]) -> type[_Form]:
        is_own = not form.__module__.startswith("moe_jax.")
        if kind in _FORMS and not (is_own and _path_of(_FORMS[kind]) == _path_of(form)):
            raise ValueError(f"a form {kind!r} is registered already")
        if issubclass(form, KernelForm) and form.over_base:
            for split in _SPLITS:
                known = {
                    name: spec
                    for one in _deltas()
                    if one.kind != kind
                    for name, spec in one.stored_specs(split).items()
                }
                for name, spec in form.stored_specs(split).items():
                    if known.get(name, spec) != spec:
                        raise ValueError(f"leaf {name!r} of form {kind!r} is {spec}, and in another form {known[name]}")
        form.kind = kind
        _FORMS.register(kind, form)
        FORM_OPTIONS[kind] = cast(type[ExpertForm], form)
        return form

    return add


def _path_of(form: type[ExpertForm]) -> tuple[str, str]:
    return form.__module__, form.__qualname__


def unregister(kind: str) -> None:
    """Removes a form from the registry."""
    del _FORMS[kind], FORM_OPTIONS[kind]


def form_named(kind: str) -> type[ExpertForm]:
    """The form with this name.

    Raises:
      InputError: if there is none.
    """
    _FORMS.check("bank kind", kind)
    return _FORMS[kind]


def registered() -> tuple[type[ExpertForm], ...]:
    """All forms, in the order in which they were registered."""
    return tuple(_FORMS.values())


def form_of_option(text: str) -> ExpertForm:
    """Reads a value of `upcycle --delta`, such as `low-rank:16`; errors as of `read_delta`."""
    form = read_delta(text)
    assert isinstance(form, ExpertForm)  # all forms of the library are registered here
    return form


def option_of_form(form: str | ExpertForm) -> str:
    """Returns the value of `upcycle --delta` that means a form; a text is returned as it is.

    Raises:
      InputError: if upcycling does not offer the form, or the form has options that no value of `--delta` has.
    """
    if isinstance(form, str):
        return form
    if not isinstance(form, ExpertForm) or form.delta_option is None:
        offered = ", ".join(delta_options().values())
        raise InputError(f"delta={shown(form)}: upcycling makes no such experts; it is one of {offered}")
    named = form.delta_option.partition(":")[0]
    text = f"{named}:{getattr(form, form.delta_number[0])}" if form.delta_number else named
    if form_of_option(text) != form:
        raise InputError(f"delta={shown(form)}: upcycling sets no other options than {form.delta_option} has")
    return text


def kinds_with(option: str) -> list[str]:
    """The kinds whose forms have an option of this name."""
    return [kind for kind, form in _FORMS.items() if option in {field.name for field in dataclasses.fields(form)}]


def delta_specs(split: Split) -> dict[str, P]:
    """How the leaves [E, ...] of all forms over a base are sharded, by path below `experts/delta/MATRIX`."""
    return dict(_specs(split))


def shared_delta_specs() -> dict[str, P]:
    """How leaves are sharded that the matrices of an expert have in common, by path below `experts/delta`."""
    joint = (form for form in _deltas() if issubclass(form, CodedJointly))
    return {name: spec for form in joint for name, spec in form.shared_stored_specs().items()}


def _specs(split: Split) -> Iterator[tuple[str, P]]:
    for form in _deltas():
        yield from form.stored_specs(split).items()


def _deltas() -> Iterator[type[KernelForm]]:
    return (form for form in _FORMS.values() if issubclass(form, KernelForm) and form.over_base)
