"""The table of the methods of compression, and the options of `compress` and of a sweep over several methods."""

import dataclasses
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from moe_jax.compression.options.around_centre import (
    AllocateOptions,
    BinaryOptions,
    D2MoEOptions,
    QuantizeOptions,
    ResMoEOptions,
    SparsifyOptions,
)
from moe_jax.compression.options.in_common import MethodOptions
from moe_jax.compression.options.of_kernels import (
    HQQOptions,
    MoBEOptions,
    NF4Options,
    PlainQuantizeOptions,
    SVDOptions,
    UnstructuredPruningOptions,
)
from moe_jax.compression.options.of_whole_experts import (
    GitReBasinOptions,
    HCSMoEOptions,
    MEOOptions,
    MLPFusionOptions,
    MSMoEOptions,
    REAMOptions,
    REAPOptions,
    StructuredPruningOptions,
)
from moe_jax.core.errors import InputError, check_member, check_positive, flag_of, is_finite, nearest, shown
from moe_jax.core.formatting import parse_bytes
from moe_jax.core.verb_spec import Option, Shown, TakesCalibrationSeed, name_of
from moe_jax.data.calibration_texts.weighted_sources import CalibrationSources, describe_sources, weighted_sources
from moe_jax.data.sections import check_seq_len

if TYPE_CHECKING:  # they import JAX, and the command line should read options without it
    from moe_jax.compression.methods.interface import Method
    from moe_jax.model_io.model_source import ModelLike
    from moe_jax.models import ModelConfig

METHOD_OPTIONS: dict[str, type[MethodOptions]] = {
    "ders-sparsify": SparsifyOptions,
    "ders-quantize": QuantizeOptions,
    "resmoe": ResMoEOptions,
    "up": UnstructuredPruningOptions,
    "sp": StructuredPruningOptions,
    "svd": SVDOptions,
    "msmoe": MSMoEOptions,
    "meo": MEOOptions,
    "git-rebasin": GitReBasinOptions,
    "mlp-fusion": MLPFusionOptions,
    "quantize": PlainQuantizeOptions,
    "reap": REAPOptions,
    "ream": REAMOptions,
    "hc-smoe": HCSMoEOptions,
    "d2-moe": D2MoEOptions,
    "binary": BinaryOptions,
    "hqq": HQQOptions,
    "nf4": NF4Options,
    "mobe": MoBEOptions,
    "allocate": AllocateOptions,
}
"""The options of every method, by its name."""


class _Methods(MutableMapping[str, "type[Method]"]):
    """The methods by name, imported when they are asked for; one that is set here is added to `METHOD_OPTIONS`."""

    def __getitem__(self, name: str) -> "type[Method]":
        return METHOD_OPTIONS[name].method_class()

    def __setitem__(self, name: str, method: "type[Method]") -> None:
        METHOD_OPTIONS[name] = method

    def __delitem__(self, name: str) -> None:
        del METHOD_OPTIONS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(METHOD_OPTIONS)

    def __len__(self) -> int:
        return len(METHOD_OPTIONS)


METHODS: MutableMapping[str, "type[Method]"] = _Methods()
# What other libraries have as methods of their own.
_NAMES_ELSEWHERE = {
    "awq": "quantize with --calibrate, --row-scales and --no-feedback",
    "gptq": "quantize with --calibrate",
    "rtn": "quantize without --calibrate",
    "wanda": "up with --calibrate",
}


def check_method(name: str) -> None:
    """Raises `InputError` for an unknown method; it says what is nearest, or how what others call so is asked for."""
    if isinstance(name, str) and (asked := _NAMES_ELSEWHERE.get(name.lower())):
        raise InputError(f"unknown method {shown(name)}: here it is {asked}")
    check_member("method", name, tuple(METHOD_OPTIONS))


def option_names() -> tuple[str, ...]:
    """Options of all methods."""
    return tuple(dict.fromkeys(name for method in METHOD_OPTIONS for name in options_of(method)))


def make_options(name: str, options: Mapping[str, Any]) -> MethodOptions:
    """Makes the options of a method, by its key in `METHOD_OPTIONS`, from those that the user gave, by name.

    Raises:
      InputError: for an unknown method, an option of another one, one that is missing, or a value out of range.
    """
    check_method(name)
    check_options([name], options)
    for field in dataclasses.fields(METHOD_OPTIONS[name]):
        if field.default is dataclasses.MISSING and field.name not in options:
            raise InputError(f"{name} needs {flag_of(field.name)}")
    return METHOD_OPTIONS[name](**options)


def make_method(name: str, options: Mapping[str, Any]) -> "Method":
    """Makes a method, by its key in `METHODS`; errors as of `make_options`."""
    return make_options(name, options).to_method()


def make_swept_options(name: str, options: Mapping[str, Any]) -> list[tuple[str, MethodOptions]]:
    """Makes the options of what a sweep tries of a method, one for each value; errors as of `make_options`.

    Of the method's swept option, `options` have all the values to try, by default the method's own.
    """
    check_method(name)
    swept, values = METHOD_OPTIONS[name].swept
    fixed = dict(options)
    return [(name, make_options(name, fixed | {swept: value})) for value in dict.fromkeys(fixed.pop(swept, values))]


def make_swept_methods(names: Sequence[str], options: Mapping[str, Any]) -> "list[tuple[str, Method]]":
    """Makes what `sweep` tries: each of the methods, with those of the options that it takes.

    Raises `InputError` as `make_swept_options` does, and for an option that none of them takes.
    """
    for name in names:
        check_method(name)
    check_options(names, options)
    given = {name: {key: value for key, value in options.items() if key in options_of(name)} for name in names}
    return [(name, made.to_method()) for name in given for name, made in make_swept_options(name, given[name])]


def check_options(names: Sequence[str], options: Iterable[str]) -> None:
    """Raises `InputError` for an option that none of the methods takes."""
    for option in options:
        takers = [method for method in METHOD_OPTIONS if option in options_of(method)]
        if not set(takers) & set(names):
            belongs = f"it belongs to {', '.join(takers)}" if takers else "no method takes it"
            raise InputError(f"{flag_of(option)} does not go with {', '.join(names)}: {belongs}")


def options_of(method: str) -> tuple[str, ...]:
    """The options of a method."""
    return tuple(field.name for field in dataclasses.fields(METHOD_OPTIONS[method]))


_ONE = r"\s*\d{1,9}(?:-\d{1,9})?\s*"
_STACK = rf"(?:all|top:\d{{1,9}}|{_ONE}(?:,{_ONE})*)"
_OF_CALIBRATION = ("samples", "calibration_seed", "calibration_dir", "image_folder", "save_imatrix")
_LAYERS = re.compile(rf"{_STACK}|(?:encoder|decoder):{_STACK}(?:,(?:encoder|decoder):{_STACK})*")
"""Forms in which layers are named; `parse_layers` says what they mean."""

MethodOption = str | int | float | bool | None
"""A value of an option of a method; which ones a method has are the fields of its class."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressSpec(TakesCalibrationSeed):
    """The options of `compress`. Those of its method may also be given beside them, by their names.

        >>> spec = moe_jax.CompressSpec(method="up", options={"keep": 0.25}, layers="top:1")
        >>> moe_jax.compress(moe_jax.tiny_model(experts=4), None, spec).lineage[-1]["options"]["layers"]
        (1,)

    Raises:
      InputError: for options that do not go together.
    """

    local_only: ClassVar[tuple[str, ...]] = ("calibration_dir",)
    reads_windows: ClassVar[bool] = False

    method: Annotated[str | MethodOptions | None, Shown("NAME", read_as=str | None)] = None
    """How: the name of a method, or a method itself."""
    options: Mapping[str, MethodOption] | None = None
    """Options of the method, where that is a name."""
    base: Annotated["ModelLike | None", Shown("DENSE", read_as=Path | None)] = None
    """The dense model that the experts came from, for deltas from it; by default the base that a layer has already, or
    else the mean of its experts."""
    model_base: Annotated[str | os.PathLike[str] | None, Shown("DIR", "where it was", Path | None)] = None
    """Path of the model that the given one stands on, if it was moved: of the base of an adapter directory, or of what
    the run of a checkpoint was begun with."""
    extended: bool = False
    """The universal FFN beside the experts becomes one more delta of the same base."""
    layers: Annotated[str | Sequence[int] | None, Shown("all|top:N|0,3,8-11", "all", str | None)] = None
    """The layers to compress, counted from 0, or the last N MoE layers; the others stay as they are. Of a model with an
    encoder, encoder:SOME,decoder:SOME counts them in each stack."""
    calibrate: Annotated[CalibrationSources | None, Shown("SOURCE[:WEIGHT],...", read_as=str | None)] = None
    """What the model is run on first: methods that merge experts then know how these are used, all others (but
    sp and mlp-fusion, which do not look at it) what the experts are given, and keep what changes outputs least. Without
    it, all experts and all inputs count alike, and methods that cannot do without (allocate, binary, d2-moe, hc-smoe,
    reap, ream) are refused.
    A source is a text; a file of JSON or a table, with rows as training data has, for a model that sees with pictures;
    `built-in`, texts, code, mathematics and conversations that come with the library; `self`, what the model itself
    writes; or a TOML file of [[sources]] as in a recipe. Several share the samples by their weights, by default alike:
    a.txt:2,chats.jsonl:1. Python takes a list, or a dict of weights, too."""
    imatrix: Annotated[str | os.PathLike[str] | None, Shown("FILE", "the text says it, if any", Path | None)] = None
    """In place of `calibrate`: what llama.cpp's llama-imatrix measured on this model. Methods that change what outputs
    lose least then know how large the inputs of every expert are, though not which of them go together; those that look
    at outputs can do nothing."""
    save_imatrix: Annotated[str | os.PathLike[str] | None, Shown("FILE", "it is not kept", Path | None)] = None
    """With `calibrate`: a file that keeps how large the inputs of experts were, for `imatrix`; must not exist."""
    samples: Annotated[int | None, Shown("N", "128, or as many as there are")] = None
    """With `calibrate`: windows of a text, rows of a file, and texts of the model, of all sources together."""
    gradients: bool = False
    """With `calibrate`: tokens count by the squared gradient of the text's loss with respect to what a layer gives for
    them; otherwise all alike. For experts alone: with --of model, all tokens count alike for everything else. The pass
    over the text then also runs backwards."""
    calibration_dir: Annotated[
        str | os.PathLike[str] | None, Shown("DIR", "MODEL.calibration, if that can be written", Path | None)
    ] = None
    """With `calibrate`: where the recording is kept, for the same text to be used again; of a model in memory nowhere
    else."""
    image_folder: Annotated[str | os.PathLike[str] | None, Shown("DIR", "that of the file", Path | None)] = None
    """With `calibrate`: the folder that names of pictures are inside of."""
    rotate: bool = False
    """First rotates what passes between layers, and the values of attention heads, which spreads few large weights over
    all: the model computes the same, and codes round it with less error. All its weights change, and a head that is
    tied to the embedding becomes one of its own. Not of models with LayerNorms, or with norms after a branch."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of what is not in codes, in experts and in all else; by default as stored."""
    seq_len: Annotated[int | None, Shown("TOKENS", "1024, or what the model can do; 256 for recover")] = None
    """With `calibrate` or a sweep: tokens that the model sees at a time."""
    batch_size: Annotated[int | None, Shown("N", "8")] = None
    """With `calibrate` or a sweep: windows computed at once. Does not change the result, but for `recover`: windows of
    a step."""
    recover: Annotated[float | None, Shown("MINUTES", "nothing is tuned")] = None
    """With `calibrate`: after the compression, what is small and not codes (routers, norms, biases, scales) is tuned
    for so long, so that the model predicts what MODEL predicts. The text is the same, drawn anew; a part of it is held
    out, to choose the best step, and to say what was won. Both models have to fit into memory."""
    recover_steps: Annotated[int | None, Shown("N", "as many as go into recover")] = None
    """The same for so many steps, which give the same result wherever they are done; with `recover`, until either is
    reached."""

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) and not _LAYERS.fullmatch(self.layers):
            raise InputError(f"--layers {shown(self.layers)}: expected all, top:N, or layers such as 0,3,8-11")
        sizes = [flag_of(name) for name in ("seq_len", "batch_size") if self._has(name)]
        if sizes and not self.reads_windows and self.calibrate is None:
            raise InputError(f"{', '.join(sizes)}: only with --sweep or --calibrate")
        unused = [flag_of(name) for name in _OF_CALIBRATION if self._has(name)]
        unused += ["--gradients"] if self.gradients else []
        if unused and self.calibrate is None:
            raise InputError(f"{', '.join(unused)}: only with --calibrate")
        if self.recovers and self.calibrate is None:
            raise InputError("--recover learns from a text: give one with --calibrate")
        if self.recover is not None and not (is_finite(self.recover) and self.recover > 0):
            raise InputError(f"--recover {shown(self.recover)}: expected a number of minutes above 0")
        check_positive(self, "samples", "batch_size", "recover_steps")
        if self.imatrix is not None and (self.calibrate is not None or self.extended):
            raise InputError(
                "--imatrix goes neither with --extended, for its file says nothing of that FFN, nor with --calibrate, "
                "which says more"
            )
        if self.rotate and (self.imatrix is not None or self.save_imatrix is not None):
            raise InputError("an imatrix does not go with --rotate: it knows the inputs as they are without it")
        self.check_calibration_seed()
        if self.seq_len is not None:
            check_seq_len(self.seq_len)

    @property
    def recovers(self) -> bool:
        """Whether small parameters are tuned after the compression."""
        return self.recover is not None or self.recover_steps is not None

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Makes a spec from options by their names, those of the method among them; None: not given."""
        fields = [field.name for field in dataclasses.fields(cls)]
        own = {name: value for name, value in given.items() if name in fields}
        of_method = {name: value for name, value in given.items() if name not in fields}
        for name in of_method:
            if name not in option_names():
                known = (*fields, *option_names())
                raise InputError(f"unknown option {shown(name)}{nearest(name, known)}; known: {', '.join(known)}")
        return super().of(own | ({"options": {**(own.get("options") or {}), **of_method}} if of_method else {}))

    @classmethod
    def list_options(cls) -> list[Option]:
        """The options but those of the methods; the text of `method` says what every one does."""
        summaries = (
            f"{name}: {(inspect.getdoc(method) or name).splitlines()[0]}" for name, method in METHOD_OPTIONS.items()
        )
        methods = "\n".join(["How. With --sweep several, separated by commas, by default all.", *summaries])
        listed = [option for option in super().list_options() if option.name != "options"]
        return [option._replace(text=methods) if option.name == "method" else option for option in listed]

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options as keywords of a function, those of all methods at the end."""
        of_methods = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in option_names()]
        taken = {parameter.name for parameter in super().parameters()}
        return [*super().parameters(), *(one.replace(default=None) for one in of_methods if one.name not in taken)]

    def check_named(self) -> None:
        """Raises `InputError` if no method is named."""
        if self.method is None:
            raise InputError("--method is missing; see moe-jax compress --help")

    def named_method(self) -> "tuple[str, Method]":
        """Returns the method with its name; `InputError` if there is none, or its options do not go with it."""
        self.check_named()
        assert self.method is not None
        if not isinstance(self.method, MethodOptions):
            given = {key: value for key, value in (self.options or {}).items() if value is not None}
            if isinstance(size := given.get("target_bytes"), str):
                given["target_bytes"] = parse_bytes(size, flag="target_bytes")
            return self.method, make_method(self.method, given)
        if self.options:
            raise InputError(f"{', '.join(self.options)}: options of a method that is given itself")
        method = self.method.to_method()
        return next(name for name, kind in METHODS.items() if kind is type(method)), method

    def described(self, layers: Sequence[int] | None) -> dict[str, Any]:
        """Returns the options but the method's for the lineage; `layers` are those that are meant."""
        base = None if self.base is None else name_of(self.base)
        described: dict[str, Any] = {"base": base, "extended": self.extended, "layers": layers}
        if self.dtype is not None:
            described["dtype"] = self.dtype
        if self.rotate:
            described["rotate"] = True
        if self.imatrix is not None:
            described["imatrix"] = str(self.imatrix)
        if self.calibrate is not None:
            described["calibrate"] = describe_sources(weighted_sources(self.calibrate))
            described |= {"seq_len": self.seq_len, "samples": self.samples}
            described |= {"calibration_seed": self.calibration_seed} | ({"gradients": True} if self.gradients else {})
            described |= {} if self.image_folder is None else {"image_folder": str(self.image_folder)}
        if self.recovers:
            described |= {"recover": self.recover, "recover_steps": self.recover_steps, "batch_size": self.batch_size}
        return described


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSpec(CompressSpec):
    """The options of a sweep: those of `compress`, and the text that its models are scored by."""

    reads_windows: ClassVar[bool] = True

    text: Annotated[str | os.PathLike[str] | None, Shown("FILE", read_as=Path | None)] = None
    """With --sweep, which requires it: a text file."""

    def __post_init__(self) -> None:
        if self.text is None:
            raise InputError("--sweep needs --text FILE, to measure the perplexity of")
        if self.save_imatrix is not None:
            raise InputError("--save-imatrix: not with --sweep; compress by one method, or export")
        if self.recovers:
            raise InputError("--recover: not with --sweep, which compares compressions themselves")
        super().__post_init__()


def parse_layers(text: str, config: "ModelConfig") -> tuple[int, ...] | None:
    """Reads which layers a user means.

    The text is `all`; `top:N`, the last N MoE layers; or layers and ranges of layers, counted from 0, separated by
    commas. A range stands for the MoE layers in it. Of a model with an encoder, layers are counted through both stacks;
    or in each of them, if any of these stands after `encoder:` or `decoder:`. Returns indices in the order given, of
    which one named on its own need not be an MoE layer; None: all MoE layers.

    Raises:
      InputError: if it cannot be read, asks for more MoE layers than there are, or names a range without any, or a
        stack that the model does not have.
    """
    if text == "all":
        return None
    if not re.match(r"(encoder|decoder):", text):
        return _parse_stack(text, config.moe_layers, "the model")
    if not config.has_encoder:
        raise InputError(f"--layers {text}: the model has no encoder; name its layers without a stack")
    first, found = config.num_encoder_layers, []
    for part in re.split(r",(?=(?:encoder|decoder):)", text):
        stack, _, rest = part.partition(":")
        layers = range(first) if stack == "encoder" else range(first, config.num_layers)
        moe = [layers.index(i) for i in config.moe_layers if i in layers]
        chosen = moe if rest == "all" else _parse_stack(rest, moe, f"the {stack}")
        if not chosen:
            raise InputError(f"--layers {part}: the {stack} has no MoE layers")
        outside = [i for i in chosen if i >= len(layers)]
        if outside:
            raise InputError(f"--layers {part}: the {stack} has layers 0 to {len(layers) - 1}, and no {outside[0]}")
        found += [layers[i] for i in chosen]
    return tuple(found)


def _parse_stack(text: str, moe: Sequence[int], where: str) -> tuple[int, ...] | None:
    """Reads the layers of one stack; `moe` are its MoE layers, counted within the stack."""
    if top := re.fullmatch(r"top:(\d{1,9})", text):
        count = int(top[1])
        if not 1 <= count <= max(1, len(moe)):
            raise InputError(f"--layers {text}: {where} has {len(moe)} MoE layers")
        return tuple(moe[-count:]) or None  # a model without MoE layers is refused elsewhere
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if ends is None:
            raise InputError(f"--layers {shown(text)}: expected all, top:N, or layers such as 0,3,8-11")
        if ends[2] is None:
            found.append(int(ends[1]))
            continue
        some = [i for i in moe if int(ends[1]) <= i <= int(ends[2])]
        if not some:
            raise InputError(f"--layers {part.strip()}: none of them is an MoE layer")
        found += some
    return tuple(found)
