"""Recipes as TOML tables: overrides from the command line, writing them back, and the list of their keys."""

import copy
import dataclasses
import fnmatch
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moe_jax.core.errors import InputError, clipped, nearest, shown
from moe_jax.core.verb_spec import attribute_texts
from moe_jax.files.json_toml import MAX_KEY_PARTS, parse_toml
from moe_jax.files.storage_path import nearest_path


def apply_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns `table` with overrides `a.b=value`. A value that is not TOML is taken as a string.

    Raises:
      InputError: if an override is not of the form `key=value`, or its path leads through a value that is not a table.
    """
    result = copy.deepcopy(dict(table))
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
    """Maps every key path of a dataclass (`train.steps`) to its value, as JSON has it: arrays of tables are lists."""
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{field.name}.")
        elif isinstance(value, tuple):
            flat[prefix + field.name] = [flatten(item) if dataclasses.is_dataclass(item) else item for item in value]
        else:
            flat[prefix + field.name] = value
    return flat


def _value(text: str) -> Any:
    try:
        table = parse_toml(f"value = {text}", where="--set")
    except InputError:
        return text
    # A line break in it would begin further keys.
    return table["value"] if len(table) == 1 else text


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


class RecipeKey(NamedTuple):
    """A key that a recipe may have, named by its path: `train.steps`, or `data.sources[].path` in items of an array.

    `kind` are the values that it takes, and `text` is its meaning. The default is as TOML; None: there is none, and
    `is_required` says whether the key may be left out.
    """

    name: str
    kind: str
    default: str | None
    is_required: bool
    text: str


def recipe_keys(recipe: type, patterns: Sequence[str] = ()) -> list[RecipeKey]:
    """Returns the keys of the dataclass `Recipe` whose names match one of the patterns, or contain it; by default all.

    Raises `InputError` if a pattern matches no key.
    """
    keys = {key.name: key for key in _keys_of(recipe, "")}
    wanted: set[str] = set() if patterns else set(keys)
    for pattern in patterns:
        matching = {name for name in keys if pattern in name or fnmatch.fnmatchcase(name, pattern)}
        if not matching:
            names = [part for name in keys for part in (name, name.rpartition(".")[2])]
            raise InputError(f"no key of a recipe matches {shown(pattern)}{nearest(pattern, names)}")
        wanted |= matching
    return [key for name, key in keys.items() if name in wanted]


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


PACKAGE = "moe_jax.recipes"
"""In a checkout this is the folder `train/recipes`."""


def shipped_recipes() -> dict[str, Path]:
    """Returns the files of the recipes by their names, such as `upcycle_small`."""
    files = (Path(str(file)) for file in resources.files(PACKAGE).iterdir())
    return {file.stem: file for file in sorted(files) if file.suffix == ".toml"}


def shipped_config(named: Path, model: str) -> Path | None:
    """Returns the config that comes with a shipped recipe, where the `model` that the recipe names is not there.

    It says enough to plan a step, or to compile one, before there are any weights. It has the name of the model, or
    that of the recipe, where the model is what another run left.
    """
    recipe = recipe_file(named)
    stem = recipe.name.removesuffix(".toml")
    if stem not in shipped_recipes() or Path(model).exists():
        return None
    configs = (recipe.parent / "configs" / f"{name}.json" for name in (Path(model).name, stem))
    return next((config for config in configs if config.is_file()), None)


def recipe_file(named: Path) -> Path:
    """Returns the file of a recipe: the path itself, or that of the shipped recipe of this name.

    A file or address of this name comes first; a folder, such as that of a run, does not. `.toml` may follow the name.

    Raises:
      FileNotFoundError: if a name without a folder is neither a file's nor a shipped recipe's; lists these.
    """
    if len(named.parts) != 1 or (named.exists() and not named.is_dir()):
        return named
    shipped = shipped_recipes()
    if named.stem in shipped and named.suffix in ("", ".toml"):
        return shipped[named.stem]
    if named.suffix or named.exists():
        return named
    listed = ", ".join(shipped)
    raise FileNotFoundError(f"no recipe at {named}{nearest(named.name, shipped)}; the library comes with {listed}")


def nearest_recipe(absent: Path) -> str:
    """Returns what to give in place of an absent file: a file with a name near its own, or a shipped recipe."""
    shipped = shipped_recipes()
    if absent.stem in shipped and absent.suffix in ("", ".toml"):
        return f"; the library comes with that recipe: give its name, {absent.stem}"
    names = [f"{name}.toml" for name in shipped] if len(absent.parts) == 1 else []
    return nearest_path(absent) or nearest(absent.name, names, cutoff=0.8)
