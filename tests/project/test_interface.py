"""What a user can set, and what holds where he sets nothing, is in one table, `interface.txt`.

    python -m tests.project.test_interface

writes the table again. Who changes a default changes its line there, where a reader sees old and new side by side.
"""

import dataclasses
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator

import moe_jax
from moe_jax.commands.cli import COMMANDS

TABLE = pathlib.Path(__file__).with_name("interface.txt")
ROOMS = ("moe_jax", "moe_jax.configs", "moe_jax.nn", "moe_jax.functional", "moe_jax.peft", "moe_jax.compression",
         "moe_jax.training")  # fmt: skip
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def arguments_of(value) -> Iterator[str]:
    """Yields the arguments of a dataclass, another class or a function with their defaults, `*` before keywords."""
    positional = True
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if field.init:
                if positional and field.kw_only:
                    positional = False
                    yield "*"
                yield field.name if default is dataclasses.MISSING else f"{field.name} = {default!r}"
    elif hasattr(value, "_field_defaults"):  # a named tuple
        for name in value._fields:
            default = value._field_defaults.get(name, dataclasses.MISSING)
            yield name if default is dataclasses.MISSING else f"{name} = {default!r}"
    elif inspect.isfunction(value) or inspect.isclass(value) and "__init__" in vars(value):
        for parameter in inspect.signature(value).parameters.values():
            if positional and parameter.kind is parameter.KEYWORD_ONLY:
                positional = False
                yield "*"
            default = "" if parameter.default is parameter.empty else f" = {_ADDRESS.sub('', repr(parameter.default))}"
            yield f"{parameter.name}{default}"


def table() -> str:
    """Returns the table: the options of each command, and the arguments of each public function and class."""
    parts = {}
    for command in COMMANDS:
        parts[f"moe-jax {command}"] = importlib.import_module(f"moe_jax.commands.{command}").Options
    seen = set()
    for room in map(importlib.import_module, ROOMS):
        for name in sorted(dir(room)):
            value = getattr(room, name)
            if not name.startswith("_") and id(value) not in seen:
                seen.add(id(value))
                parts[f"{room.__name__}.{name}"] = value
    found = {name: list(arguments_of(value)) for name, value in parts.items()}
    return "\n".join("\n".join([f"# {name}", *lines, ""]) for name, lines in found.items() if lines)


def test_defaults_are_those_of_the_table():
    assert TABLE.read_text(encoding="utf-8") == table()


def test_what_is_listed_is_what_is_public():
    listed = set(moe_jax.__all__)
    assert {"load", "Model", "configs"} <= listed <= set(dir(moe_jax))
    assert not any(name.startswith("_") for name in listed)


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
