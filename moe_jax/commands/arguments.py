"""Reads the arguments of a command into its `Options` with tyro, and explains them: `moe-jax COMMAND --help`.

argparse lays the help out. The help of tyro is not used: it has no groups of options and no examples, keeps the line
breaks of a docstring wherever they are, and does not fill the description; the parser that it would give to argparse is
deprecated.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import io
import math
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from moe_jax.commands.options import value_word, words_of
from moe_jax.core.errors import InputError, clipped, flag_of, nearest, shown
from moe_jax.core.formatting import full_name
from moe_jax.core.verb_spec import field_texts
from moe_jax.files.json_toml import fits_64_bits
from moe_jax.files.staging import check_local
from moe_jax.files.storage_path import as_path

T = TypeVar("T")
_MISSING = "missing: "


def parse_arguments(options: type[T], arguments: Sequence[str], *, command: str) -> T | None:
    """Reads the arguments after a command into its options; None if they only ask for completions for a shell.

    Raises:
      InputError: for arguments that are unknown, missing or cannot be read, numbers that are not finite or have more
        than 64 bits, and paths that are not on a local disk.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), _parser_reports_to(options):
            parsed = tyro.cli(
                options,
                args=_with_full_names(options, arguments),
                prog=f"moe-jax {command}",
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        return _checked(parsed)
    except SystemExit as stop:
        if not stop.code:
            return None
        problem = _words(printed.getvalue())
    except _Rejected as rejected:
        problem = str(rejected)
        unknown = _unknown_flags(arguments, options)
        if unknown and problem.startswith(_MISSING):  # the parser may have taken what follows for its value
            problem = _unknown(unknown, options)
    raise InputError(f"{problem}; see moe-jax {command} --help")


def _with_full_names(options: type, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the full names of dtypes: `--dtype bf16` becomes `--dtype bfloat16`."""
    choices = {flag_of(name): words_of(hint) for name, hint in typing.get_type_hints(options).items()}
    full, flag = [], ""
    for argument in arguments:
        before, equals, value = argument.partition("=")
        if equals and choices.get(before):
            full.append(f"{before}={full_name(value, choices[before])}")
        else:
            full.append(full_name(argument, choices.get(flag, ())))
        flag = argument
    return full


class _Rejected(Exception):
    """The arguments are wrong; the message says how."""


@contextlib.contextmanager
def _parser_reports_to(options: type) -> Any:
    """Raises the errors that tyro's parser would print in a box as `_Rejected`.

    The hook is not part of tyro's public interface. Where it is absent, or reports an event that is not known here,
    tyro prints its box and exits, and the message is made of the words in the box.
    """
    try:
        from tyro._errors import on_parse_error
    except ImportError:
        yield
        return

    def report(event: Any) -> None:
        with contextlib.suppress(AttributeError, KeyError):
            raise _Rejected(_PROBLEMS[type(event).__name__](event, options))

    with on_parse_error(report):
        yield


def _missing(event: Any, options: type) -> str:
    if event.unrecognized_tokens:
        return _unknown(event.unrecognized_tokens, options)
    return f"{_MISSING}{', '.join(_name(context.arg) for context in event.missing_arguments)}"


def _unknown(tokens: Sequence[str], options: type) -> str:
    # Words after an unknown option are probably its values.
    tokens = [token for token in tokens if token.startswith("--")] or tokens
    hinted = [token + nearest(token, _flags(options)) if token.startswith("--") else token for token in tokens]
    return f"unknown: {clipped(' '.join(hinted))}"


def _flags(options: type) -> list[str]:
    return [flag_of(field.name) for field in dataclasses.fields(options)]


def _unknown_flags(arguments: Sequence[str], options: type) -> list[str]:
    """Returns a list with the first argument that looks like an option but is none; empty if there is no such one."""
    flags = _flags(options)
    looking = (word.partition("=")[0] for word in arguments if re.match("--?[A-Za-z]", word))
    return next(([word] for word in looking if word.replace("_", "-") not in flags), [])


def _bad_value(event: Any, options: type) -> str:
    name = _name(event.argument)
    if event.offending_value is not None:
        return f"{name} takes no value, got {shown(event.offending_value)}"
    return f"{_MISSING}{name}" if event.argument.is_positional() else f"{name} needs a value"


def _not_chosen(event: Any, options: type) -> str:
    choices = [choice for choice in event.choices if choice != "None"]
    hint = nearest(event.value, choices)
    return f"{_name(event.argument)}: expected one of {', '.join(choices)}, got {shown(event.value)}{hint}"


def _not_built(event: Any, options: type) -> str:
    message = str(event.message)
    first = clipped(message.partition("\n")[0])
    if event.argument is None:
        return first
    given = re.search(r"instantiated from \[(.*?)\]\.|: ('.*'|\".*\")$", message)
    expected = _expected(event.argument.field.type_stripped)
    if given is None or expected is None:
        return f"{_name(event.argument)}: {first}"
    return f"{_name(event.argument)}: expected {expected}, got {clipped(given[1] or given[2])}"


def _expected(hint: Any) -> str | None:
    """Says in words which values an option takes; None if these are not numbers."""
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    if hint in (int, float):
        return "an integer" if hint is int else "a number"
    if typing.get_origin(hint) is tuple:
        return "integers with spaces between them" if parts[0] is int else None
    return _expected(parts[0]) if len(parts) == 1 else None


_PROBLEMS = {
    "MissingArgs": _missing,
    "UnrecognizedArgs": lambda event, options: _unknown(event.tokens, options),
    "BadValue": _bad_value,
    "InvalidChoice": _not_chosen,
    "InstantiationFailure": _not_built,
}


def _name(argument: Any) -> str:
    """Returns an option as users write it, such as `--top-k`; for a positional argument, its name in the help."""
    return argument.lowered.metavar if argument.is_positional() else argument.display_name()


def _words(box: str) -> str:
    """Returns the words in a box that tyro printed, without its frame."""
    return clipped(" ".join(re.sub(r"[^\x20-\x7e]|-{3,}", " ", box).split()))


def _checked(options: Any) -> Any:
    """Returns the options, with paths in a bucket for its addresses; an error for a value that no option can have."""
    paths: dict[str, Any] = {}
    local_only = getattr(options, "local_only", ())
    for field in dataclasses.fields(options):
        given = getattr(options, field.name)
        values = given if isinstance(given, tuple) else (given,)
        for value in values:
            if isinstance(value, float) and not math.isfinite(value):
                raise _Rejected(f"{flag_of(field.name)}: expected a finite number, got {value}")
            if isinstance(value, int) and not fits_64_bits(value):
                raise _Rejected(f"{flag_of(field.name)}: {shown(value)} does not fit into 64 bits")
            if isinstance(value, Path):
                check_local(value, buckets=field.name not in local_only)
        if any(isinstance(value, Path) for value in values) and field.name not in local_only:
            made = tuple(map(as_path, values))
            paths[field.name] = made if isinstance(given, tuple) else made[0]
    return dataclasses.replace(options, **paths)


WIDEST = 110
"""Columns of the help on a wide terminal; longer lines are hard to read."""
_POSITIONAL = typing.get_args(tyro.conf.Positional[int])[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explained:
    """An argument of a command, as the help shows it.

    Attributes:
      call: how users write it, such as `--top-k N` or `MODEL`.
      text: its help; line breaks are kept, so that the meaning for each of several methods stands on its own line.
      default: the default in parentheses, or nothing.
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
    texts = field_texts(options)
    return [_explained(field, hints[field.name], texts.get(field.name, "")) for field in dataclasses.fields(options)]


def help_of(
    options: type,
    command: str,
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    examples: str = "",
    width: int | None = None,
) -> str:
    """Returns the help of a command, whose texts are the docstrings of its class and fields.

    `groups` are names of fields by the title of their group; fields without a group come last. The width is by default
    that of the terminal, but at most `WIDEST`.
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
    extras = getattr(hint, "__metadata__", ())
    arg: Any = next((extra for extra in extras if hasattr(extra, "help_behavior_hint")), tyro.conf.arg())
    kind = typing.get_args(hint)[0] if extras else hint
    is_positional, is_switch = _POSITIONAL in extras, kind is bool
    value = "" if is_switch else arg.metavar or value_word(kind)
    call = value if is_positional else f"{flag_of(field.name)} {value}".strip()
    default = arg.help_behavior_hint
    if any("append" in repr(extra).lower() for extra in extras):
        default = "(repeatable)"
    elif default is None and not is_switch and field.default not in (dataclasses.MISSING, None, ()):
        default = f"(default: {field.default})"
    return Explained(
        name=field.name,
        call=call,
        text=arg.help or text,
        default=default or "",
        is_positional=is_positional,
        is_switch=is_switch,
    )
