"""Recipes as TOML tables: overrides from the command line, and writing them back."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from moe_jax.core.errors import InputError, clipped
from moe_jax.files.json_toml import MAX_KEY_PARTS, parse_toml


def apply_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns `table` with overrides `a.b=value`. A value that is not TOML is taken as a string.

    Raises:
      InputError: if an override is not of the form `key=value`, or its path leads through a value that is not a table.
    """
    result = _copy(table)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys) or len(keys) > MAX_KEY_PARTS:
            raise InputError(f"--set {clipped(override)}: expected KEY=VALUE, as in --set train.steps=100")
        node = result
        for depth, key in enumerate(keys[:-1]):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                before = clipped(".".join(keys[: depth + 1]))
                raise InputError(f"--set {clipped(override)}: {before} is a value and holds no keys")
        node[keys[-1]] = _value(text.strip())
    return result


def to_toml(config: Any) -> str:
    """Writes a dataclass as TOML that `files.strict.parse` reads back equal; fields that are None are left out."""
    return "\n".join(_table_lines(config, "")) + "\n"


def to_table(config: Any) -> dict[str, Any]:
    """Returns a dataclass as the table that `to_toml` writes."""
    return tomllib.loads(to_toml(config))


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


def plain(value: Any) -> Any:
    """Returns a value of `flatten` without dataclasses, as JSON has it: arrays of tables become lists of dicts."""
    if isinstance(value, tuple):
        return [flatten(item) if dataclasses.is_dataclass(item) else item for item in value]
    return value


def _value(text: str) -> Any:
    try:
        table = parse_toml(f"value = {text}", where="--set")
    except InputError:
        return text
    # A line break in it would begin further keys.
    return table["value"] if len(table) == 1 else text


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
            plain.append(f"{field.name} = {toml_value(value)}")
    return plain + tables


def toml_value(value: Any) -> str:
    """Writes a boolean, number, string or array of them as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escaped(character) for character in value) + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return str(value)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if ord(character) < 32 or ord(character) == 127:
        return f"\\u{ord(character):04x}"
    return character
