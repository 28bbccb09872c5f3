"""The examples of a task file: JSON lines or a JSON list, perhaps compressed with gzip, read as data only."""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any

from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.files.regular_files import read_regular

MAX_BYTES = 1 << 30
"""Most bytes of a file, and of the content of a compressed one."""


def read_examples(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file, in order.

    Args:
      path: a file of JSON lines (blank ones are skipped) or of one JSON list; compressed if its name ends in `.gz`.

    Raises:
      FileNotFoundError: no such file.
      InputError: if it is neither, holds anything but objects, or nothing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no data at {path}")
    content = read_regular(path, max_bytes=MAX_BYTES)
    if path.suffix == ".gz":
        content = _unpacked(content, path)
    examples = _read_list(content, path) if content.lstrip()[:1] == b"[" else _read_lines(content, path)
    if not examples:
        raise InputError(f"{path} holds no examples")
    return examples


def _unpacked(content: bytes, path: Path) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as file:
            unpacked = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a gzip file: {error}") from None
    if len(unpacked) > MAX_BYTES:
        raise InputError(f"{path} unpacks to more than {MAX_BYTES:,} bytes")
    return unpacked


def _read_list(content: bytes, path: Path) -> list[dict[str, Any]]:
    found = parse_json(content, where=str(path), allow=ANYTHING, max_values=len(content))
    for number, example in enumerate(found, start=1):
        _check(example, f"{path}, example {number}")
    return found


def _read_lines(content: bytes, path: Path) -> list[dict[str, Any]]:
    examples = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line and not line.isspace():
            where = f"{path}, line {number}"
            examples.append(_check(parse_json(line, where=where, allow=ANYTHING, max_values=len(line)), where))
    return examples


def _check(example: Any, where: str) -> dict[str, Any]:
    if not isinstance(example, dict):
        raise InputError(f"{where}: expected an object, got a JSON {type(example).__name__}")
    return example
