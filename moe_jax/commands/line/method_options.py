"""The options of the methods of compression, as `moe-jax compress` takes them.

The fields of the methods are the only list of them. Types, defaults and the texts of `--help` come from there: a method
that is added to the table has its options at once. The metadata of a field may name its values better, as "metavar".
"""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import tyro

from moe_jax.compression import METHODS, Method, make_method, make_swept_methods
from moe_jax.core.attribute_texts import attribute_texts
from moe_jax.core.errors import InputError, check_member, flag_of, shown
from moe_jax.core.formatting import parse_bytes


class _Option(NamedTuple):
    """A field of a method."""

    method: str
    name: str
    kind: Any
    default: Any
    choices: tuple[str, ...]
    metavar: str
    text: str

    @property
    def is_switch(self) -> bool:
        return self.kind is bool


def command_fields() -> list[tuple[str, Any, dataclasses.Field]]:
    """Fields for `dataclasses.make_dataclass`: one for every option of any method, None or False if it is not given."""
    options = [option for name in METHODS for option in _options(name)]
    fields = []
    for name in dict.fromkeys(option.name for option in options):
        same = [option for option in options if option.name == name]
        texts: dict[str, list[str]] = {}
        for option in same:
            texts.setdefault(option.text, []).append(option.method)
        text = "\n".join(f"{', '.join(methods)}: {text}" for text, methods in texts.items())
        if same[0].is_switch:
            text = f"Leaves out what is done otherwise.\n{text}" if same[0].default else text
            fields.append(
                (_switch(same[0]), Annotated[bool, tyro.conf.arg(help=text)], dataclasses.field(default=False))
            )
            continue
        metavar = "|".join(dict.fromkeys(option.metavar for option in same))
        defaults = dict.fromkeys(_shown(option.default) for option in same)
        hint = f"(default: {' or '.join(defaults)})" if all(defaults) else ""
        arg = tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=hint)
        fields.append((name, Annotated[str | None, arg], dataclasses.field(default=None)))
    return fields


def given_options(options: Any) -> dict[str, Any]:
    """Returns the options of methods that the user gave, by the names of the fields: texts, or bool for switches.

    Args:
      options: an object with the fields of `command_fields`.
    """
    given = {}
    for name in METHODS:
        for option in _options(name):
            value = getattr(options, _switch(option) if option.is_switch else option.name)
            if value not in (None, False):
                given[option.name] = (not option.default) if option.is_switch else value
    return given


def one_method(name: str, given: Mapping[str, Any]) -> Method:
    """Makes the method that the user asks for.

    Raises:
      InputError: for an unknown method, options that do not go with it, and values that cannot be read or are several.
    """
    options = {}
    for key, value in _read(name, given).items():
        values = value if isinstance(value, tuple) else (value,)
        if len(values) > 1:
            raise InputError(f"{flag_of(key)} {given[key]}: several values need --sweep")
        options[key] = next(iter(values))
    return make_method(name, options)


def swept_methods(
    names: Sequence[str], given: Mapping[str, Any], *, calibrated: bool = False
) -> list[tuple[str, Method]]:
    """Makes all methods that a sweep tries, by name: every method gets the options that it can read.

    Args:
      names: names of methods; none: the methods whose swept option is given, or else all.
      given: the options, as `given_options` returns them.
      calibrated: whether there is a text; without one, methods that need it are tried only if they are named.

    Raises:
      InputError: if no method can read an option, and as in `one_method`.
    """
    for name in names:
        if name not in METHODS:
            make_method(name, {})  # says so
    if not names:
        usable = [name for name, method in METHODS.items() if calibrated or not method.needs_calibration]
        swept = {name: METHODS[name].swept[0] for name in usable}
        names = [name for name, key in swept.items() if key in given and key not in _refused(name, given)]
        names = names or usable
    refused = {name: _refused(name, given) for name in names}
    for key in given:
        if all(key in refusals for refusals in refused.values()):
            raise refused[names[0]][key]
    made = []
    for name in names:
        options = {key: value for key, value in given.items() if key not in refused[name]}
        made += make_swept_methods([name], _read(name, options))
    return made


def _refused(name: str, given: Mapping[str, Any]) -> dict[str, InputError]:
    """Returns the options that a method cannot have, each with the error that says why."""
    refusals = {}
    for key, value in given.items():
        try:
            read = _read(name, {key: value})
            if key not in {option.name for option in _options(name)}:
                make_method(name, read)
        except InputError as error:
            refusals[key] = error
    return refusals


def _read(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options in the types of a method, its swept option with all values; leaves others as they are."""
    known = {option.name: option for option in _options(name)} if name in METHODS else {}
    read = dict(given)
    for key, value in given.items():
        if key in known and isinstance(value, str):
            swept = METHODS[name].swept[0] == key
            read[key] = _values(known[key], value) if swept else _value(known[key], value)
    return read


def _values(option: _Option, text: str) -> tuple[Any, ...]:
    try:
        return tuple(_value(option, part) for part in text.split(","))
    except InputError:
        expected = {int: "whole numbers", float: "numbers"}.get(option.kind, option.metavar)
        raise InputError(f"{flag_of(option.name)} {shown(text)}: expected {expected}, separated by commas") from None


def _value(option: _Option, text: str) -> Any:
    if option.name.endswith("_bytes"):
        return parse_bytes(text, flag=flag_of(option.name))
    if option.choices:
        check_member(option.name, text, option.choices)
    if option.kind not in (int, float):
        return text
    try:
        return option.kind(text)
    except ValueError:
        expected = "a whole number" if option.kind is int else "a number"
        raise InputError(f"{flag_of(option.name)} {shown(text)}: expected {expected}") from None


def _options(name: str) -> list[_Option]:
    method = METHODS[name]
    hints, texts = typing.get_type_hints(method), attribute_texts(method)
    return [
        _Option(
            method=name,
            name=field.name,
            kind=_kind(hints[field.name]),
            default=field.default,
            choices=_choices(hints[field.name]),
            metavar=field.metadata.get("metavar") or _metavar(field.name, hints[field.name]),
            text=texts.get(field.name, ""),
        )
        for field in dataclasses.fields(method)
    ]


def _kind(hint: Any) -> type:
    """Returns the type of a field without None; `str` if it is a choice between words."""
    parts = [part for part in (typing.get_args(hint) or (hint,)) if part is not types.NoneType]
    return str if _choices(hint) else parts[0]


def _choices(hint: Any) -> tuple[str, ...]:
    """Returns the words that a field chooses from."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is typing.Literal:
            return typing.get_args(part)
    return ()


def _metavar(name: str, hint: Any) -> str:
    if _choices(hint):
        return "|".join(_choices(hint))
    return "BYTES" if name.endswith("_bytes") else {int: "INT", float: "FLOAT"}.get(_kind(hint), "TEXT")


def _shown(default: Any) -> str:
    return "" if default is dataclasses.MISSING or default is None else str(default)


def _switch(option: _Option) -> str:
    """Returns the name of a switch, which says what it changes: `no_refit` where the method refits by default."""
    return f"no_{option.name}" if option.default else option.name
