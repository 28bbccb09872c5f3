"""The safetensors format: 8 bytes with the length of a JSON header, the header, the tensors' bytes.

A header is checked completely against the file before any tensor is read.
Source: https://github.com/huggingface/safetensors, `Format`.
"""

import json
import math
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from moe_jax.conversion.formats.tensors import DTYPE_BITS, MAX_RANK, TensorEntry, check_tensor_name
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.files.byte_files import ByteFile, open_bytes
from moe_jax.files.json_toml import MAX_BYTES, parse_json

# The reference implementation accepts three times as much. A hundred thousand tensors need less.
MAX_HEADER = MAX_BYTES


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Reads the names of the tensors in a file, and their positions.

    Raises:
      InputError: if the file is truncated, its header is corrupt or impossibly large, names a tensor twice, or
        describes bytes that overlap, leave gaps or lie outside the file.
    """
    with open_bytes(path) as file:
        prefix = file.bytes_at(0, 8)
        length = int.from_bytes(prefix, "little")
        text = file.bytes_at(8, length) if len(prefix) == 8 and length <= MAX_HEADER else b""
        if len(prefix) < 8 or (len(text) < length and length > file.size - 8):
            wanted = length if len(prefix) == 8 else 8
            raise _bad(path, f"its header should take {wanted} bytes, the file has {file.size}")
        if length > MAX_HEADER:
            raise _bad(path, f"its header claims {length:,} bytes, at most {MAX_HEADER:,} are read")
        header = _parse(path, text)
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        entries = {name: _entry(path, file.identity, name, value, 8 + length) for name, value in tensors.items()}
        _check_cover(path, entries, 8 + length, file)
    return entries


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]]) -> bytes:
    """Returns the first bytes of a file, up to the tensors.

    Args:
      tensors: name -> (dtype, shape, first byte, end (exclusive)), bytes counted from the end of the header.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape, start, stop) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin aligned
    return len(text).to_bytes(8, "little") + text


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = parse_json(text, where="its header")
    except InputError as error:
        raise _bad(path, str(error)) from None
    if not isinstance(header, dict):
        raise _bad(path, f"its header is a JSON {type(header).__name__}, expected an object")
    notes = header.get("__metadata__", {})
    if text[:1] != b"{" or not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise _bad(path, "its header is not an object from its first byte on, or its __metadata__ are not strings")
    return header


def _entry(path: Path, identity: Hashable, name: str, value: Any, data_start: int) -> TensorEntry:
    check_tensor_name(path, name)
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"the entry of {shown(name)} in its header is not a dtype, a shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        hint = nearest(dtype, DTYPE_BITS) if isinstance(dtype, str) else ""
        raise _bad(path, f"{shown(name)} has the unknown dtype {shown(dtype)}{hint}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > MAX_RANK:
        raise _bad(path, f"{shown(name)} has shape {shown(shape)} and data_offsets {shown(offsets)}, expected counts")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        # Some types have less than eight bits.
        takes = f"{shown(bits // 8)} bytes" if bits % 8 == 0 else f"{shown(bits)} bits"
        raise _bad(
            path, f"{shown(name)}, {dtype} {shown(shape)}, takes {takes}, but its data_offsets {offsets} span "
            f"{offsets[1] - offsets[0]}"
        )  # fmt: skip
    return TensorEntry(path, dtype, tuple(shape), data_start + offsets[0], identity)


def _check_cover(path: Path, entries: Mapping[str, TensorEntry], start: int, file: ByteFile) -> None:
    """Raises `InputError` unless the tensors fill the rest of the file: no gap, no overlap, nothing beyond the end."""
    # It is quicker to learn whether a file ends at a position than where it ends.
    end = start + sum(entry.nbytes for entry in entries.values())
    size = end if file.ends_at(end) else file.size
    position, previous = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start + entry.nbytes > size:
            missing = entry.start + entry.nbytes - size
            raise _bad(path, f"{shown(name)} ends {missing} bytes after the end of the file; the file is truncated")
        if entry.start != position:
            fault = "overlaps" if entry.start < position else "leaves a gap after"
            raise _bad(path, f"{shown(name)} {fault} {shown(previous)}")
        position, previous = entry.start + entry.nbytes, name
    if position != size:
        raise _bad(path, f"{size - position} bytes at its end belong to no tensor")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _bad(path: Path, problem: str) -> InputError:
    return InputError(f"{path} is not a valid safetensors file: {problem}; fetch it again")
