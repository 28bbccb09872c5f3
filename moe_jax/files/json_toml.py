"""Reads JSON and TOML within limits: whatever a file holds, reading it neither hangs nor exhausts memory.

Python's own parsers accept content of any size and depth, the last of two equal keys, NaN, integers of any size and
strings that are not Unicode. All of these are errors here, in one line that says where.
"""

import collections
import json
import math
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from moe_jax.core.errors import InputError, shown
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


def read_json_object(
    file: Path,
    *,
    allow: Collection[Unusual] = (),
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    inside: Directory | None = None,
) -> dict[str, Any]:
    """Returns the content of a JSON file that must hold one object, as `read_json` does."""
    data = read_json(file, allow=allow, max_bytes=max_bytes, max_values=max_values, inside=inside)
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
        _check_unicode(value, where)
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
    """Returns the table that a TOML text stands for.

    Raises:
      InputError: if it is not TOML, or is nested more than `MAX_DEPTH` levels deep, or a key has more than
        `MAX_KEY_PARTS` parts.
    """
    # The time that Python takes grows with the square of a key's parts.
    if _LONG_KEY.search(_STRING_OR_COMMENT.sub("_", text)):
        raise InputError(f"{where}: a key has more than {MAX_KEY_PARTS} parts joined by dots")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:  # also of an integer with too many digits
        raise InputError(f"{where} is not TOML: {error}") from None
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


def _too_deep(where: str) -> InputError:
    return InputError(f"{where} is nested more than {MAX_DEPTH} levels deep")


def _check_unicode(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = str(error.object)[error.start]
        raise InputError(f"{where}: a string holds {half!r}, one half of a character in UTF-16") from None
