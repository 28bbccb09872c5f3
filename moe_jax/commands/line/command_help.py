"""The help of `moe-jax COMMAND --help`: the task of the command, its arguments and options by group, and examples.

argparse lays it out. The help of tyro, which parses the arguments, is not used: it has no groups of options and no
examples, keeps the line breaks of a docstring wherever they are, and does not fill the description; the parser that
it would give to argparse is deprecated.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from moe_jax.core.errors import flag_of

WIDEST = 110
"""Columns of the help on a wide terminal; longer lines are hard to read."""
_POSITIONAL = typing.get_args(tyro.conf.Positional[int])[1]
_WORDS = {int: "N", float: "X", str: "TEXT"}


@dataclasses.dataclass(frozen=True)
class Explained:
    """An argument of a command, as the help shows it.

    Attributes:
      name: name of the field.
      call: how users write it, such as `--top-k N` or `MODEL`.
      text: its help; line breaks are kept, so that the meaning for each of several methods stands on its own line.
      default: the default in parentheses, or nothing.
      is_positional: whether it is written without a name.
      is_switch: whether it takes no value.
    """

    name: str
    call: str
    text: str
    default: str
    is_positional: bool
    is_switch: bool


def explained(options: type) -> list[Explained]:
    """Returns the arguments of a command, in the order of its fields."""
    hints = typing.get_type_hints(options, include_extras=True)
    texts = _texts(options)
    return [_explained(field, hints[field.name], texts.get(field.name, "")) for field in dataclasses.fields(options)]


def help_of(
    options: type,
    command: str,
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    examples: str = "",
    width: int | None = None,
) -> str:
    """Returns the help of a command.

    Args:
      options: its dataclass; the docstrings of class and fields are the texts.
      command: its name, as in `moe-jax train`.
      groups: names of fields by the title of their group; fields without a group come last.
      examples: lines of commands, and of comments on them.
      width: number of columns; by default that of the terminal, but at most `WIDEST`.
    """
    width = min(width or shutil.get_terminal_size().columns, WIDEST)
    arguments = explained(options)
    positional = [argument for argument in arguments if argument.is_positional]
    options_too = ["[OPTIONS]"] if len(positional) < len(arguments) else []
    parser = argparse.ArgumentParser(
        usage=" ".join(["moe-jax", command, "[-h]", *options_too, *(argument.call for argument in positional)]),
        description="\n\n".join(_filled(part, width) for part in inspect.cleandoc(options.__doc__ or "").split("\n\n")),
        epilog="examples:\n" + textwrap.indent(inspect.cleandoc(examples), "  ") if examples else None,
        formatter_class=functools.partial(_Formatter, width=width),
        add_help=False,
    )
    left = {argument.name: argument for argument in arguments if not argument.is_positional}
    grouped = {title: [left.pop(name) for name in names] for title, names in (groups or {}).items()}
    grouped = {"arguments": positional, **grouped, "other options" if groups else "options": list(left.values())}
    for title, members in grouped.items():
        group = parser.add_argument_group(title)
        for argument in members:
            name, _, value = argument.call.partition(" ")
            name, value = (argument.name, argument.call) if argument.is_positional else (name, value)
            given: dict[str, Any] = {"action": "store_true"} if argument.is_switch else {"metavar": value}
            group.add_argument(name, help=f"{argument.text} {argument.default}".strip().replace("%", "%%"), **given)
    return parser.format_help().rstrip()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Formats as argparse does, but keeps line breaks in the text of an option, and breaks no word at its hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.split("\n") for line in _filled(part, width).split("\n")]


def _filled(text: str, width: int) -> str:
    return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


def _explained(field: dataclasses.Field, hint: Any, text: str) -> Explained:
    given = [extra for extra in getattr(hint, "__metadata__", ()) if hasattr(extra, "help_behavior_hint")]
    metavar = next((extra.metavar for extra in given if extra.metavar), None)
    text = next((extra.help for extra in given if extra.help), text)
    behavior = next((extra.help_behavior_hint for extra in given if extra.help_behavior_hint is not None), None)
    is_positional = _POSITIONAL in getattr(hint, "__metadata__", ())
    kind = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    is_switch = kind is bool
    value = "" if is_switch else _plain(metavar) if metavar else _value(kind)
    call = value if is_positional else f"{flag_of(field.name)} {value}".strip()
    is_repeated = any("append" in repr(extra).lower() for extra in getattr(hint, "__metadata__", ()))
    default = "(repeatable)" if is_repeated else _default(field) if behavior is None and not is_switch else behavior
    return Explained(field.name, call, text, default or "", is_positional, is_switch)


def _plain(metavar: str) -> str:
    """Returns a metavar with N for an integer and X for a number, so that all commands use the same words."""
    return re.sub(r"\bINT\b", "N", re.sub(r"\bFLOAT\b", "X", metavar)).replace("N [N ...]", "N ...")


def _default(field: dataclasses.Field) -> str:
    return "" if field.default in (dataclasses.MISSING, None, ()) else f"(default: {field.default})"


def _value(kind: Any) -> str:
    """Returns the placeholder for a value of a type, such as `N` for an integer, or the words to choose from."""
    parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, parts))
    if typing.get_origin(kind) is tuple:
        return f"{_value(parts[0])} ..."
    return _value(parts[0]) if parts else _WORDS.get(kind, "PATH")


def _texts(options: type) -> dict[str, str]:
    """Returns the docstrings under the fields of a dataclass and its bases, by field."""
    texts: dict[str, str] = {}
    for base in reversed(options.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made by `make_dataclass`, whose fields bring their texts
            continue
        (definition,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match following:
                    case ast.Expr(ast.Constant(str(text))):
                        texts[statement.target.id] = re.sub(r"\s+", " ", text)
    return texts
