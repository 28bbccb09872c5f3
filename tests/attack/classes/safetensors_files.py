"""safetensors files: their headers, and headers that would exhaust the machine."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save

from moe_jax.conversion.safetensors_file import read_header
from moe_jax.conversion.tensors import DTYPES, TensorFiles
from tests.attack.attacks import Attack
from tests.attack.mutations import mutated_bytes, mutated_json

FILE = "model.safetensors"
Tensors = dict[str, tuple[tuple[int, ...], str, bytes]]


def _original() -> tuple[dict[str, Any], bytes]:
    """The header of a file, and the bytes after it."""
    tensors = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b.weight": np.arange(6).astype(ml_dtypes.bfloat16),
        "c.bias": np.arange(5, dtype=np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.0, np.float32),
        "count": np.array(3),
    }
    content = save(tensors, {"format": "pt"})
    stop = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:stop]), content[stop:]


def with_header(text: bytes, data: bytes) -> bytes:
    """A file with this header."""
    return len(text).to_bytes(8, "little") + text + data


def _mutate_header(chance: random.Random, original: Any, folder: Path) -> None:
    header, data = original
    (folder / FILE).write_bytes(with_header(mutated_json(chance, header), data))


def _mutate_bytes(chance: random.Random, original: Any, folder: Path) -> None:
    """The length and the header; the format has no checksums of what comes after."""
    header, data = original
    content = with_header(json.dumps(header).encode(), data)
    stop = len(content) - len(data)
    (folder / FILE).write_bytes(mutated_bytes(chance, content[:stop]) + content[stop:])


def _exhaust(chance: random.Random, original: Any, folder: Path) -> None:
    text = chance.choice(_EXHAUSTING)(chance)
    (folder / FILE).write_bytes(with_header(text, b"0" * chance.choice((0, 4, 1000))))


def _one(shape: bytes, offsets: bytes = b"0,4") -> bytes:
    return b'{"a":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[' + offsets + b"]}}"


_EXHAUSTING: tuple[Callable[[random.Random], bytes], ...] = (
    lambda chance: b"[" * chance.randint(1000, 75_000_000),
    lambda chance: b'{"a":' * chance.randint(1000, 6_000_000),
    lambda chance: b'{"a":[' + b"{}," * chance.randint(1000, 6_000_000) + b"{}]}",
    lambda chance: b'{"a":[' + b"1," * chance.randint(1000, 30_000_000) + b"1]}",
    lambda chance: b"{" + b'"a":1,' * chance.randint(1000, 6_000_000) + b'"a":1}',
    lambda chance: b"{" + b",".join(b'"%d":{}' % i for i in range(chance.randint(1000, 1_000_000))) + b"}",
    lambda chance: _one(b"1," * chance.randint(10, 20_000_000) + b"1"),
    lambda chance: _one(b"9" * chance.choice((30, 400, 4000, 5000, 10_000_000))),
    lambda chance: _one(b"4611686018427387904," * chance.randint(2, 100_000) + b"1"),
    lambda chance: _one(b"1", b"0," * chance.randint(2, 1_000_000) + b"4"),
    lambda chance: _one(b"1").replace(b'"a"', b'"' + b"a" * chance.randint(1000, 70_000_000) + b'"'),
    lambda chance: _one(b"1").replace(b"F32", b"F" * chance.randint(1000, 70_000_000)),
    lambda chance: _one(b"1").replace(b"a", "\U0001f600".encode() * chance.randint(1000, 17_000_000)),
    lambda chance: b'{"__metadata__":{"a":"' + b"\\u0041" * chance.randint(1000, 5_000_000) + b'"}}',
    lambda chance: b" " * chance.randint(1000, 90_000_000),
)


def _read(folder: Path, out: Path) -> Tensors:
    files, tensors = TensorFiles(), {}
    for name, entry in read_header(folder / FILE).items():
        if entry.dtype in DTYPES:
            array = np.empty(entry.shape, DTYPES[entry.dtype])
            files.read_into(entry, 0, array)
            tensors[name] = (entry.shape, entry.dtype, array.tobytes())
    return tensors


def _differs_from_library(original: Any, folder: Path, read: Tensors) -> str | None:
    try:
        found = safetensors.deserialize((folder / FILE).read_bytes())
    except Exception as error:
        return f"the library refuses it: {error}"
    theirs = {
        name: (tuple(tensor["shape"]), tensor["dtype"], bytes(tensor["data"]))
        for name, tensor in found
        if tensor["dtype"] in DTYPES
    }
    return None if read == theirs else "other tensors than the library reads"


def _attack(name: str, make: Any, quick: int = 200) -> Attack:
    return Attack(
        name=f"{FILE}: {name}", original=_original, make=make, read=_read, wrong=_differs_from_library, quick=quick
    )


ATTACKS = (
    _attack("header", _mutate_header),
    _attack("bytes of the header", _mutate_bytes),
    _attack("exhausting", _exhaust, quick=10),
)
