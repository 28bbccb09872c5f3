"""The config of a bank: the form of its experts, and how their shared base is stored."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from moe_jax.core.code_options import DEFAULT_GROUP_SIZE, BaseCodesOptions
from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.core.formatting import short_repr
from moe_jax.experts.forms import ExpertForm, Full, KernelForm, ffn_matrices
from moe_jax.experts.forms.coding import ByExpert
from moe_jax.experts.forms.kernel_of_codes import NF4, Coded, CodedLevels, CodedNF4
from moe_jax.experts.forms.protocol import form_named, kinds_with
from moe_jax.experts.forms.quantized import Quantized
from moe_jax.experts.forms.sparse import ENCODINGS
from moe_jax.experts.shapes import FFNConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseCodes(BaseCodesOptions):
    """The kernels of a base in codes, which the experts' own parts are added to (methods.md 4).

    >>> from moe_jax.experts import BaseCodes
    >>> BaseCodes(code="4").group_size, BaseCodes(code="nf4").describe()
    (128, 'NF4 codes')
    """

    __repr__ = short_repr

    def has(self, name: str) -> bool:
        """Whether the matrix of this name has a base."""
        return self.own_bits.get(name) != 0

    @property
    def form(self) -> Coded:
        """The form of a kernel, of the matrices that have a base."""
        if self.group_size is None:
            return CodedNF4(codes=NF4())
        own: Any = {f"{name}_bits": bits or None for name, bits in self.own_bits.items()}
        codes = {"bits": int(self.code), "group_size": self.group_size, "table": self.table}
        return CodedLevels(codes=Quantized(**codes, scale_bits=self.scale_bits, **own))

    @property
    def adjective(self) -> str:
        """The codes in one word, such as `4-bit`."""
        if self.group_size is None:
            return "NF4"
        return f"{self.code}-bit{self.own_bits_in_words()}"

    def describe(self) -> str:
        """In words, for tables."""
        groups = "" if self.group_size in (None, DEFAULT_GROUP_SIZE) else f" in groups of {self.group_size}"
        return f"{self.adjective} codes{groups}{self.more_in_words()}"


@dataclasses.dataclass(frozen=True, init=False)
class BankConfig:
    """The form of the experts of a layer, and how their shared base is stored (methods.md 2.1-2.3, 4, 5, 6).

        >>> moe_jax.BankConfig(kind="low-rank", rank=4).has_base, moe_jax.BankConfig().has_base
        (True, False)

    Attributes:
      form: the form of the experts, with its options; see `experts.forms`.
      base: `shared`: experts of a form over a base have one; `none`: they have their own part alone. Other forms ignore
        it.
      train_base: whether the base is trained.
      base_codes: the codes in which the base is stored; None: it is stored in the dtype of the model.
    """

    form: ExpertForm
    base: Literal["shared", "none"]
    train_base: bool
    base_codes: BaseCodes | None

    def __init__(
        self,
        form: ExpertForm | None = None,
        *,
        kind: str | None = None,
        base: Literal["shared", "none"] = "shared",
        train_base: bool = True,
        base_codes: BaseCodes | None = None,
        **options: Any,
    ):
        """Takes a form, or its kind and options: `kind="sparse", rate=0.9` stands for `Sparse(rate=0.9)`.

        Args:
          form: default: full kernels.
          kind: the name of a form.
          base, train_base, base_codes: see above.
          options: of the form `kind`; None means that an option is not given.

        Raises:
          InputError: for an unknown name, options that the form does not have or that make no sense, or a base that
            does not go with it.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if form is not None and (kind is not None or given):
            raise InputError("give a form, or its kind with its options, but not both")
        if form is None:
            form = _made(kind or Full.kind, given)
        form.check_base(base)
        for name, value in dict(form=form, base=base, train_base=train_base, base_codes=base_codes).items():
            object.__setattr__(self, name, value)
        is_added_to = self.has_base and isinstance(form, KernelForm) and form.adds_to_base
        if base_codes is not None and not is_added_to:
            raise InputError(
                f"base_codes go with a shared base that experts are added to, which {form.kind} experts with base "
                f"{base!r} do not have"
            )

    def __repr__(self) -> str:
        beside = short_repr(_Sharing(base=self.base, train_base=self.train_base, base_codes=self.base_codes))
        given = [short_repr(self.form), beside.removeprefix("_Sharing(").removesuffix(")")]
        return f"BankConfig({', '.join(filter(None, given))})"

    def of_same_base(self, form: ExpertForm) -> "BankConfig":
        """Returns the config of experts of another form over the same base."""
        return BankConfig(form, base=self.base, train_base=self.train_base, base_codes=self.base_codes)

    @property
    def kind(self) -> str:
        """The name of the form, for messages and tables."""
        return self.form.kind

    def describe(self) -> str:
        """The form in words, and before it the base if it is in codes: `4-bit centre, quantized, 2 bits`."""
        return ("" if self.base_codes is None else f"{self.base_codes.adjective} centre, ") + self.form.describe()

    @property
    def has_base(self) -> bool:
        """Whether the bank has base kernels."""
        return self.form.over_base and self.base == "shared"

    def has_base_of(self, name: str) -> bool:
        """Whether the bank has a base kernel of the matrix of this name."""
        return self.has_base and (self.base_codes is None or self.base_codes.has(name))

    @property
    def has_own_kernels(self) -> bool:
        """Whether every expert has whole kernels of its own."""
        return isinstance(self.form, KernelForm) and not self.form.over_base

    @property
    def has_linear_maps(self) -> bool:
        """Whether the bank has kernels that can have LoRA or, unless they are in codes already, be stored as NF4.

        These are whole kernels, or the kernels of a base that is applied on its own.
        """
        return not self.form.over_base or (self.has_base and self.form.adds_to_base)

    @property
    def meets_sorted_rows(self) -> bool:
        """Whether these kernels are multiplied with rows sorted by expert, not with tokens: rows have no dropout."""
        return not self.form.over_base

    def check_fits(self, expert: FFNConfig, d_model: int) -> None:
        """Raises `InputError` if the options do not fit experts of this shape."""
        matrices = ffn_matrices(expert, d_model)
        self.form.check_fits(matrices)
        if self.has_base and not any(map(self.has_base_of, matrices)):
            raise InputError("base_codes of a base of no matrix at all: leave them out, and give base 'none'")

    def check_count(self, num_experts: int) -> None:
        """Raises `InputError` if the options are those of another number of experts."""
        if isinstance(self.form, ByExpert):
            self.form.check_count(num_experts)

    def multiplied_entries(self, expert: FFNConfig, d_model: int, top_k: int) -> int:
        """How many entries of the bank's matrices a token is multiplied with: of the base once, and of k experts."""
        shapes = expert.shapes(d_model)
        lora = 0 if expert.lora is None else sum(expert.lora.rank * sum(shapes[name]) for name in expert.lora.targets)
        own = self.form.multiplied_entries(expert, d_model)
        if not self.form.over_base:
            return top_k * (own + lora)
        of_base = {} if self.form.includes_base else shapes
        base = sum(rows * columns for name, (rows, columns) in of_base.items() if self.has_base_of(name))
        return base + lora + top_k * own

    def given(self) -> dict[str, Any]:
        """Returns the kind, `train_base`, and every option that differs from its default, as `inspect` shows them."""
        values = dataclasses.asdict(self.form)
        fields = (field for field in dataclasses.fields(self.form) if values[field.name] != field.default)
        base = {} if self.base == "shared" else {"base": self.base}
        base |= {} if self.base_codes is None else {"base": self.base_codes.describe()}
        return (
            {"kind": self.kind, **base}
            | {field.name: values[field.name] for field in fields}
            | {"train_base": self.train_base}
        )

    def to_json(self) -> dict[str, Any]:
        """One JSON-able table with the kind, `base`, `train_base`, `base_codes` if any, and the options of the form."""
        options = dataclasses.asdict(self.form)
        codes = {} if self.base_codes is None else {"base_codes": dataclasses.asdict(self.base_codes)}
        return {"kind": self.kind, "base": self.base, "train_base": self.train_base, **codes, **options}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], build: Callable[[type, Mapping[str, Any]], Any]) -> "BankConfig | None":
        """Reads what `to_json` returned; also the tables of earlier versions, which held the options of all forms.

        Args:
          data: the table.
          build: `build(cls, fields)` checks fields and makes a dataclass of them; returns None if they are wrong.

        Returns:
          The config; None if `build` returned None.

        Raises:
          InputError: if there is no form of this kind.
        """
        always = ("kind", "base", "train_base")
        options: dict[str, Any] = {name: value for name, value in data.items() if value is not None or name in always}
        form, sharing = form_named(options.pop("kind", Full.kind)), {}
        for name in ("base", "train_base", "base_codes"):
            if name in options:
                sharing[name] = options.pop(name)
        if "places" in options and "encoding" not in options:
            check_member("places", options["places"], ENCODINGS)
            encoding = options.pop("places")
            if "encoding" in {field.name for field in dataclasses.fields(form)}:
                options["encoding"] = encoding
        built, shared = build(form, options), build(_Sharing, sharing)
        return None if built is None or shared is None else cls(built, **vars(shared))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sharing:
    """The fields of a `BankConfig` beside its form."""

    base: Literal["shared", "none"] = "shared"
    train_base: bool = True
    base_codes: BaseCodes | None = None


def _made(kind: str, options: Mapping[str, Any]) -> ExpertForm:
    form = form_named(kind)
    fields = {field.name: field for field in dataclasses.fields(form)}
    for name, value in options.items():
        if name not in fields:
            kinds = kinds_with(name)
            known = f"{' and '.join(kinds)} have one" if kinds else f"its options are {', '.join(fields) or 'none'}"
            raise InputError(f"{name}={shown(value)} does not go with bank kind {kind!r}: {known}")
    for name, field in fields.items():
        if name not in options and field.default is dataclasses.MISSING:
            raise InputError(f"bank kind {kind!r} lacks its {name}")
    return form(**options)
