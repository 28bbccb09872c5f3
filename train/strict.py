"""Frozen dataclasses from TOML tables, strictly: unknown keys and wrong types are errors, all reported together."""

import dataclasses
import datetime
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from moe_jax.errors import InputError, nearest, raise_if_any

T = TypeVar("T")


def parse(cls: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """Builds `cls`, a dataclass whose fields may be dataclasses, from a parsed TOML table.

    Accepts fields of type bool, int, float (an integer is taken too), str, `Literal`, `X | None`,
    `tuple[X, ...]` (a TOML array) and dataclasses (a TOML table).

    Raises:
      InputError: one error that lists every unknown key, missing key and value of a wrong type by its key path,
        and what the dataclasses' own checks (`InputError` from `__post_init__`) found.
    """
    problems: list[str] = []
    built = _dataclass(cls, table, "", problems)
    raise_if_any(problems, where)
    assert built is not None
    return built


def apply_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns `table` with `a.b=value` overrides put in; values are TOML values, and anything else is a bare string.

    Raises:
      InputError: if an override is not of the form `key=value` or goes through something that is no table.
    """
    result = _copy(table)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise InputError(f"--set {override}: expected KEY=VALUE, as in --set train.steps=100")
        node = result
        for depth, key in enumerate(keys[:-1]):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise InputError(f"--set {override}: {'.'.join(keys[: depth + 1])} is a value and holds no keys")
        node[keys[-1]] = _value(text.strip())
    return result


def to_toml(config: Any) -> str:
    """Writes a dataclass as TOML that `parse` reads back equal; fields that are None are left out."""
    return "\n".join(_table_lines(config, "")) + "\n"


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Maps every key path of a dataclass (`train.steps`) to its value; arrays are values."""
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def _dataclass(cls: type, table: Mapping[str, Any], path: str, problems: list[str]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    annotations = typing.get_type_hints(cls)
    before = len(problems)
    values = {}
    for key, value in table.items():
        if key not in fields:
            problems.append(f"unknown key {path + key!r}{nearest(key, fields)}")
        else:
            values[key] = _checked(annotations[key], value, path + key, problems)
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in table and not has_default:
            problems.append(f"key {path + name!r} is missing, expected {_describe(annotations[name])}")
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except InputError as error:
        problems.append(f"{path.rstrip('.')}: {error}" if path else str(error))
        return None


def _checked(annotation: Any, value: Any, path: str, problems: list[str]) -> Any:
    """Returns `value` as `annotation` wants it; otherwise notes the problem and returns None."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or origin is typing.Union:
        return _checked(next(a for a in args if a is not type(None)), value, path, problems)
    if dataclasses.is_dataclass(annotation) and isinstance(value, Mapping):
        return _dataclass(annotation, value, path + ".", problems)
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(args[0], item, f"{path}[{i}]", problems) for i, item in enumerate(value))
    if origin is Literal:
        if value in args:
            return value
        hint = nearest(value, args) if isinstance(value, str) else ""
        problems.append(f"{path}: expected {_describe(annotation)}, got {_show(value)}{hint}")
        return None
    if annotation is float and type(value) is int:
        return float(value)
    # bool is a subclass of int: `steps = true` must not pass as 1.
    if annotation in (bool, int, float, str) and type(value) is annotation:
        return value
    problems.append(f"{path}: expected {_describe(annotation)}, got {_show(value)}")
    return None


def _describe(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or origin is typing.Union:
        return _describe(next(a for a in args if a is not type(None)))
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin is tuple:
        return f"an array, each item {_describe(args[0])}"
    if dataclasses.is_dataclass(annotation):
        return "a table"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[annotation]


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    kind = kinds.get(type(value), "date or time" if isinstance(value, datetime.date | datetime.time) else "value")
    return f"the {kind} {_toml_value(value)}"


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _copy(node: Any) -> Any:
    return {key: _copy(value) for key, value in node.items()} if isinstance(node, Mapping) else node


def _table_lines(config: Any, prefix: str) -> list[str]:
    plain, tables = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            continue
        if dataclasses.is_dataclass(value):
            tables += ["", f"[{prefix}{field.name}]", *_table_lines(value, f"{prefix}{field.name}.")]
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for item in value:
                tables += ["", f"[[{prefix}{field.name}]]", *_table_lines(item, f"{prefix}{field.name}.")]
        else:
            plain.append(f"{field.name} = {_toml_value(value)}")
    return plain + tables


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escaped(character) for character in value) + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return str(value)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if ord(character) < 32 or ord(character) == 127:
        return f"\\u{ord(character):04x}"
    return character
