"""The keys of a recipe, with their types, defaults and meanings, as `moe-jax train --keys` lists them."""

import dataclasses
import fnmatch
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from moe_jax.core.attribute_texts import attribute_texts
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.training.recipe.recipe_toml import toml_value
from moe_jax.training.recipe.schema import Recipe


class RecipeKey(NamedTuple):
    """A key that a recipe may have.

    Attributes:
      name: its path, such as `train.steps`; `data.sources[].path` is a key of each item of an array.
      kind: the values that it takes.
      default: as TOML; None: there is none, and `is_required` says whether the key may be left out.
      is_required: whether its table must have it.
      text: its meaning.
    """

    name: str
    kind: str
    default: str | None
    is_required: bool
    text: str


def recipe_keys(patterns: Sequence[str] = ()) -> list[RecipeKey]:
    """Returns the keys whose names match one of the patterns, or contain it; without patterns all keys.

    Raises:
      InputError: if a pattern matches no key.
    """
    keys = list(_keys_of(Recipe, ""))
    for pattern in patterns:
        if not any(_matches(key.name, pattern) for key in keys):
            names = [part for key in keys for part in (key.name, key.name.rpartition(".")[2])]
            raise InputError(f"no key of a recipe matches {shown(pattern)}{nearest(pattern, names)}")
    return [key for key in keys if not patterns or any(_matches(key.name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return pattern in name or fnmatch.fnmatchcase(name, pattern)


def _keys_of(section: type, prefix: str) -> Iterator[RecipeKey]:
    hints, texts = typing.get_type_hints(section), attribute_texts(section)
    tables = []
    for field in dataclasses.fields(section):
        name, table, is_array = prefix + field.name, *_table(hints[field.name])
        if table is not None:
            tables.append((table, name + ("[]." if is_array else ".")))
            continue
        is_required = field.default is dataclasses.MISSING
        default = None if is_required or field.default is None else toml_value(field.default)
        yield RecipeKey(name, _described(hints[field.name]), default, is_required, texts.get(field.name, ""))
    # As in TOML, the keys of a table come before those of the tables in it.
    for table, name in tables:
        yield from _keys_of(table, name)


def _table(hint: Any) -> tuple[type | None, bool]:
    """Returns the dataclass that a key holds, if any, and whether the key holds an array of them."""
    for option in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option, typing.get_origin(hint) is tuple
    return None, False


def _described(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"array of {_described(typing.get_args(hint)[0])}"
    if parts := typing.get_args(hint):  # a union
        return " | ".join(_described(part) for part in parts if part is not types.NoneType)
    return {str: "text", int: "integer", float: "number", bool: "true | false"}.get(hint, "table")
