"""Specs: frozen dataclasses that hold the options of a verb, each option written down once.

The command line is generated from a spec (`commands.options`), the Python verb takes one or its fields as keywords
(`api.model`), and the lineage of a model stores it.
"""

import ast
import builtins
import collections
import dataclasses
import inspect
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from moe_jax.core.errors import InputError, flag_of, nearest, shown

NOT_GIVEN = (None, False, "none", 0)
"""Values of an option that ask for nothing."""


class Shown(NamedTuple):
    """Annotation of a field: how the command line shows and reads the option, where its type does not say it.

    Attributes:
      metavar: what stands for the value, such as `low-rank:R`.
      default: what holds if the option is not given, of a field whose default is None.
      read_as: the type that the command line reads, if Python takes more than that.
      repeats: whether the option may be given several times.
    """

    metavar: str
    default: str = ""
    read_as: Any = None
    repeats: bool = False


class Option(NamedTuple):
    """An option of a verb: a field, its type as the command line reads it, and the docstring under it.

    `shown` is its annotation; None: its type says all.
    """

    name: str
    kind: Any
    default: Any
    text: str
    shown: Shown | None


class Spec:
    """Base of all specs.

    `local_only` are the options that name a file or directory which cannot be in a bucket; `example` is what the
    command line could be given, for the message that an option is missing.
    """

    local_only: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str] = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Makes a spec from options by their names; None stands for an option that was not given.

        Raises:
          InputError: for an unknown option, with the nearest known one, or one that is missing; and as the spec itself.
        """
        fields: Any = cls
        known = {field.name: field for field in dataclasses.fields(fields)}
        for name in given:
            if name not in known:
                raise InputError(f"unknown option {shown(name)}{nearest(name, known)}; known: {', '.join(known)}")
        chosen = {name: value for name, value in given.items() if value is not None}
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in chosen:
                raise InputError(f"{flag_of(name)} is missing{cls.example and f', as in {cls.example}'}")
        return cls(**chosen)

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options as keywords of a function, for `help`."""
        found = inspect.signature(cls).parameters.values()
        return [parameter.replace(annotation=_without_extras(parameter.annotation)) for parameter in found]

    @classmethod
    def verb(cls) -> str:
        """Returns the name of the verb: `upcycle` of `UpcycleSpec`."""
        return cls.__name__.removesuffix("Spec").lower()

    @classmethod
    def list_options(cls) -> list[Option]:
        """The options in the order of the fields."""
        return options_of(cls)


def name_of(model: Any) -> str:
    """Returns a model's name for the lineage: the path as it was given, or where a model in memory came from."""
    return str(model) if isinstance(model, str | os.PathLike) else str(model.source.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakesMovedBase(Spec):
    """Options of a verb whose model may stand on another one."""

    base: Annotated[str | os.PathLike[str] | None, Shown("DIR", "where it was", Path | None)] = None
    """Path of the model that the given one stands on, if it was moved: of the base of an adapter directory, or of what
    the run of a checkpoint was begun with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakesNonfinite(Spec):
    """Options of a verb that reads weights."""

    allow_nonfinite: bool = False
    """Goes on where weights are NaN or infinite, instead of refusing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakesCalibrationSeed(Spec):
    """Options of a verb that draws of what it calibrates with."""

    calibration_seed: Annotated[int | None, Shown("N", "0")] = None
    """With `calibrate`: seed of the draw, and of what the model itself writes."""

    def check_calibration_seed(self) -> None:
        """Raises `InputError` for a negative one."""
        if self.calibration_seed is not None and self.calibration_seed < 0:
            raise InputError(f"--calibration-seed {self.calibration_seed} must not be negative")


def field_texts(cls: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass and its bases, by field."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made by `make_dataclass`
            continue
        (definition,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match following:
                    case ast.Expr(ast.Constant(str(text))):
                        texts[statement.target.id] = re.sub(r"\s+", " ", text)
    return texts


def attribute_texts(cls: type) -> dict[str, str]:
    """The texts under `Attributes:` in the docstrings of a class and its bases, by the name of the attribute."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for entry in re.finditer(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", section, re.MULTILINE):
            texts |= dict.fromkeys(entry[1].split(", "), " ".join(entry[2].split()))
    return texts


def options_of(spec: type, texts_of: Callable[[type], dict[str, str]] = field_texts) -> list[Option]:
    """The options of a dataclass, in the order of its fields; `texts_of` finds their texts."""
    # What a module imports only for type checkers is `Any`.
    names = collections.defaultdict(lambda: Any, {**vars(builtins), **vars(sys.modules[spec.__module__])})
    hints = typing.get_type_hints(spec, localns=names, include_extras=True)
    texts = texts_of(spec)
    options = []
    for field in dataclasses.fields(spec):
        hint = hints[field.name]
        shown = Shown(field.metadata["metavar"]) if "metavar" in field.metadata else None
        extra = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Shown)), shown)
        plain = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        kind = plain if extra is None or extra.read_as is None else extra.read_as
        options.append(Option(field.name, kind, field.default, texts.get(field.name, ""), extra))
    return options


def _without_extras(annotation: Any) -> Any:
    plain = typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    return plain.__forward_arg__ if isinstance(plain, typing.ForwardRef) else plain
