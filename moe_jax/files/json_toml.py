"""Reads JSON and TOML within limits, and dataclasses from them strictly.

Whatever a file holds, reading it neither hangs nor exhausts memory. Python's own parsers accept content of any size and
depth, the last of two equal keys, NaN, integers of any size and strings that are not Unicode. All of these are errors
here, in one line that says where. Of a dataclass, unknown keys, missing keys and wrong types are errors.
"""

import collections
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from moe_jax.core.errors import MAX_SHOWN, InputError, clipped, nearest, raise_if_any, shown
from moe_jax.core.formatting import full_name
from moe_jax.files.regular_files import Directory, read_regular

MAX_BYTES = 32 << 20
MAX_VALUES = 1_000_000
MAX_DEPTH = 100
MAX_TOML_BYTES = 1 << 20
MAX_KEY_PARTS = 16

Unusual = Literal["nonfinite", "large integers", "surrogates"]
"""Values of JSON that most files must not hold: NaN and infinities, integers beyond 64 bits, halves of characters."""

ANYTHING: tuple[Unusual, ...] = ("nonfinite", "large integers", "surrogates")
"""All unusual values, for files most of whose keys are not ours; each value is checked where it is used."""


def read_json(
    file: Path,
    *,
    allow: Collection[Unusual] = (),
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    inside: Directory | None = None,
) -> Any:
    """Returns the content of a JSON file, read by `parse_json`; `inside` is as in `open_regular`.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if it is not a regular file, larger than `max_bytes`, or not JSON within the limits.
    """
    where = str(inside.path / file if inside else file)
    return parse_json(_content(file, max_bytes, inside), where=where, allow=allow, max_values=max_values)


def read_json_object(file: Path, *, inside: Directory | None = None, **limits: Any) -> dict[str, Any]:
    """Returns the content of a JSON file that must hold one object, as `read_json` does."""
    data = read_json(file, inside=inside, **limits)
    if not isinstance(data, dict):
        where = inside.path / file if inside else file
        raise InputError(f"{where} holds a JSON {type(data).__name__}, expected an object")
    return data


def parse_json(text: bytes, *, where: str, allow: Collection[Unusual] = (), max_values: int = MAX_VALUES) -> Any:
    """Returns the value that a JSON text stands for.

    Args:
      text: UTF-8, with or without a byte order mark.
      where: the file, and perhaps the line; named in errors.
      allow: the kinds of unusual values that are accepted.
      max_values: the largest number of commas and opening brackets. Each costs about 100 bytes of memory.

    Raises:
      InputError: if it is not JSON, gives a key twice, is nested more than `MAX_DEPTH` levels deep, has too many
        values, or holds something unusual.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > max_values:
        raise InputError(f"{where} has more than {max_values:,} values, which is more than it can need")

    def integer(digits: str) -> int:
        # Python takes time that grows with the square of the digits.
        if len(digits) > 400 or ("large integers" not in allow and not fits_64_bits(int(digits))):
            raise InputError(f"{where}: the integer {shown(digits)} does not fit into 64 bits")
        return int(digits)

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value) and "nonfinite" not in allow:
            raise InputError(f"{where}: {shown(digits)} is not a finite number")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):
            ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
            raise InputError(f"{where}: the key {shown(twice)} is given more than once")
        return built

    try:
        decoded = text.decode("utf-8-sig")
        value = json.loads(
            decoded, parse_int=integer, parse_float=number, parse_constant=number, object_pairs_hook=unique
        )
    except InputError:
        raise
    except RecursionError:
        raise _too_deep(where) from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in decoded.strip() else ""  # of JSON lines, `where` has it
        what = error.msg.removesuffix(" at")
        raise InputError(f"{where} is not valid JSON: {what} at {line}column {error.colno}") from None
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON: {error}") from None
    _check_depth(value, where)
    if "surrogates" not in allow and re.search(r"\\u[dD][89a-fA-F]", decoded):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = str(error.object)[error.start]
            raise InputError(f"{where}: a string holds {half!r}, one half of a character in UTF-16") from None
    return value


def read_toml(file: Path) -> dict[str, Any]:
    """Returns the content of a TOML file, read by `parse_toml`.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if it is not a regular file, larger than `MAX_TOML_BYTES`, or not TOML within the limits.
    """
    try:
        return parse_toml(_content(file, MAX_TOML_BYTES).decode("utf-8"), where=str(file))
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not TOML: {error}") from None


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    """Returns the table that a TOML text stands for; raises `InputError` for other texts, and beyond the limits."""
    # The time that Python takes grows with the square of a key's parts.
    if _LONG_KEY.search(_STRING_OR_COMMENT.sub("_", text)):
        raise InputError(f"{where}: a key has more than {MAX_KEY_PARTS} parts joined by dots")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:  # also of an integer with too many digits
        raise InputError(f"{where} is not TOML: {error}{_given_before(text, str(error))}") from None
    _check_depth(table, where)
    return table


def fits_64_bits(value: int) -> bool:
    """Whether a signed integer of 64 bits can hold `value`."""
    return -(1 << 63) <= value < 1 << 63


def is_unicode(text: str) -> bool:
    """Whether a string can be written as UTF-8: it holds no half of a character in UTF-16."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|' r"'''.*?'''|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'|#[^\n]*", re.DOTALL
)
_KEY_OR_TABLE = re.compile(r"""\s*(?:\[[^\[\]\n]+\]|[\w."' -]+?\s*=)""")
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_KEY_PARTS}}}")


def _content(file: Path, max_bytes: int, inside: Directory | None = None) -> bytes:
    try:
        return read_regular(file, max_bytes=max_bytes, inside=inside)
    except FileNotFoundError:
        raise FileNotFoundError(f"{inside.path / file if inside else file} does not exist") from None


def _check_depth(value: Any, where: str) -> None:
    """Raises `InputError` if lists and objects are nested too deep. Level by level: recursion would fail itself."""
    level, depth = [value], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep(where)
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]


def _given_before(text: str, error: str) -> str:
    """Returns what to add to the error of a key or a table that a TOML text gives twice: its name, and both lines."""
    at = re.search(r"^Cannot (?:overwrite|declare).*\(at (?:line (\d+),|end of document)", error)
    lines = text.splitlines()
    last = 0 if at is None else int(at[1] or len(lines))
    if not 0 < last <= len(lines) or not (named := _KEY_OR_TABLE.match(lines[last - 1])):
        return ""
    for number in range(last - 1, 0, -1):
        found = _KEY_OR_TABLE.match(lines[number - 1])
        if found and found[0] == named[0]:
            return f": {shown(named[0].strip().rstrip('=').rstrip())} stands on line {number} and on line {last}"
        if found and found[0].startswith("[") and not named[0].startswith("["):
            return ""
    return ""


def _too_deep(where: str) -> InputError:
    return InputError(f"{where} is nested more than {MAX_DEPTH} levels deep")


T = TypeVar("T")


_WORDS = {"TOML": ("a table", "an array"), "JSON": ("an object", "a list")}


def without_format(data: Mapping[str, Any], name: str, version: int, *, where: str) -> dict[str, Any]:
    """Returns `data` without its keys `format` and `version`.

    Raises:
      InputError: unless these are `name` and `version`.
    """
    if data.get("format") != name:
        raise InputError(f"{where} has no format {name!r}: it was not written by moe_jax, or is another kind of file")
    if type(data.get("version")) is not int or data["version"] != version:
        raise InputError(f"{where} has version {shown(data.get('version'))}, this library reads version {version}")
    return {key: value for key, value in data.items() if key not in ("format", "version")}


def parse(cls: type[T], table: Mapping[str, Any], *, where: str, language: Literal["TOML", "JSON"]) -> T:
    """Builds `cls`, a dataclass whose fields may be dataclasses, from a parsed file; messages use its language's terms.

    Accepts fields of type bool, int (of 64 bits), float (finite; an integer is taken too), str (Unicode), `Literal` (of
    dtypes also short names: `bf16`), `X | None` (null in JSON), `tuple[X, ...]` (an array), dataclasses (a table),
    unions of these, and `Mapping` (a table that is taken as it is).
    Values that are already instances of a dataclass are taken as they are. A dataclass whose fields are not the keys of
    its table has a class method `from_json(table, build)`, where `build(cls, table)` makes another one in the same way.

    Raises:
      InputError: one error that lists every unknown key, missing key and value of a wrong type by its key path,
        and what the dataclasses' own checks (`InputError` from `__post_init__`) found.
    """
    reader, built = _Reader(language), None
    with contextlib.suppress(_Enough):
        built = reader.build(cls, table, "")
    raise_if_any(reader.problems, where)
    assert built is not None
    return built


# A list of a million wrong items is not spelled out.
_MAX_PROBLEMS = 100


class _Enough(Exception):
    """More problems were found than one message lists."""


class _Reader:
    """Builds values, and collects the problems found, one sentence each."""

    def __init__(self, language: str):
        self.problems: list[str] = []
        self._table, self._array = _WORDS[language]

    def build(self, cls: type, table: Mapping[str, Any], path: str) -> Any:
        """Builds the dataclass that a table describes; None if there is a problem."""
        if hasattr(cls, "from_json"):
            return self._built(lambda: cls.from_json(table, lambda part, rest: self.build(part, rest, path)), path)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        annotations = _annotations(cls)
        before = len(self.problems)
        values = {}
        for key, value in table.items():
            if key not in fields:
                self._note(f"unknown key {shown(path + key)}{nearest(path + key, [path + name for name in fields])}")
            else:
                values[key] = self._checked(annotations[key], value, path + key)
        for name, field in fields.items():
            has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            if name not in table and not has_default:
                self._note(f"key {path + name!r} is missing, expected {self._describe(annotations[name])}")
        if len(self.problems) > before:
            return None
        return self._built(lambda: cls(**values), path)

    def _built(self, make: Callable[[], Any], path: str) -> Any:
        try:
            return make()
        except InputError as error:
            self._note(f"{path.rstrip('.')}: {error}" if path else str(error))
            return None

    def _checked(self, annotation: Any, value: Any, path: str) -> Any:
        """Returns `value` in the type of `annotation`; if it does not fit, notes the problem and returns None."""
        if isinstance(value, str):
            value = full_name(value, _words_of(annotation))
        option = next((option for option in _options(annotation) if _fits(option, value)), None)
        if option is None:
            is_word = typing.get_origin(annotation) is Literal and isinstance(value, str)
            hint = nearest(value, typing.get_args(annotation)) if is_word else ""
            self._note(f"{path}: expected {self._describe(annotation)}, got {self._show(value)}{hint}")
            return None
        if (needed := _needed_besides(value)) is not None:
            self._note(f"{path}: expected {needed}, got {self._show(value)}")
            return None
        if dataclasses.is_dataclass(option) and isinstance(option, type) and isinstance(value, Mapping):
            return self.build(option, value, path + ".")
        if typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            return tuple(self._checked(item, one, f"{path}[{i}]") for i, one in enumerate(value))
        return float(value) if option is float else value

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        if len(self.problems) >= _MAX_PROBLEMS:
            raise _Enough

    def _describe(self, annotation: Any) -> str:
        options = [option for option in _options(annotation) if option is not type(None)]
        if len(options) > 1:
            return " or ".join(dict.fromkeys(map(self._describe, options)))
        (option,) = options
        if typing.get_origin(option) is Literal:
            return "one of " + ", ".join(repr(arg) for arg in typing.get_args(option))
        if typing.get_origin(option) is tuple:
            return f"{self._array}, each item {self._describe(typing.get_args(option)[0])}"
        return _SIMPLE.get(option, self._table)

    def _show(self, value: Any) -> str:
        if value is None:
            return "null"
        if isinstance(value, Mapping):
            return self._table
        kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: self._array.split()[1]}
        kind = kinds.get(type(value), "date or time" if isinstance(value, datetime.date | datetime.time) else "value")
        if isinstance(value, str):
            return f"the {kind} {clipped(json.dumps(value[:MAX_SHOWN], ensure_ascii=False))}"
        return f"the {kind} {json.dumps(value) if isinstance(value, bool) else shown(value)}"


_SIMPLE = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_annotations = functools.cache(typing.get_type_hints)


def _options(annotation: Any) -> tuple[Any, ...]:
    """Returns the types of a union; for any other type, the type itself."""
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if is_union else (annotation,)


def _words_of(annotation: Any) -> tuple[str, ...]:
    """Returns the strings that a field chooses from; empty if it is no choice."""
    literals = (option for option in _options(annotation) if typing.get_origin(option) is Literal)
    return tuple(word for literal in literals for word in typing.get_args(literal) if isinstance(word, str))


def _needed_besides(value: Any) -> str | None:
    """Returns the condition that a value of the right type fails, such as being finite; None if it fails none."""
    if type(value) is int and not fits_64_bits(value):
        return "an integer of at most 64 bits"
    if type(value) is float and not math.isfinite(value):
        return "a finite number"
    if type(value) is str and not is_unicode(value):
        return "text in Unicode"
    return None


def _fits(option: Any, value: Any) -> bool:
    """Whether a value is of this type; the contents of tables and arrays are not checked."""
    origin = typing.get_origin(option) or option
    if origin is Literal:
        return value in typing.get_args(option)
    if origin is tuple:
        return isinstance(value, list | tuple)
    if dataclasses.is_dataclass(option) and isinstance(option, type):
        return isinstance(value, (Mapping, option))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    # bool is a subclass of int: `steps = true` must not pass as 1.
    return option is Any or type(value) is option or (option is float and type(value) is int)
