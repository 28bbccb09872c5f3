"""Headers of GGUF files: read as they were written, and what is damaged is refused in one line."""

import pathlib
import struct

import numpy as np
import pytest

from moe_jax.conversion import is_gguf
from moe_jax.conversion.gguf.gguf_header import read_gguf_header
from moe_jax.core.errors import InputError


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


PAIRS = (
    pair("a.u8", 0, b"\x07"),
    pair("a.i32", 5, struct.pack("<i", -7)),
    pair("a.f32", 6, struct.pack("<f", 1e-5)),
    pair("a.true", 7, b"\1"),
    pair("a.text", 8, text("h\u00e9")),
    pair("a.words", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("c d")),
    pair("a.numbers", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
)
INFOS = (info("x", (2, 3)), info("y", (64,), 8, 32))
DATA = np.arange(6, dtype="<f4").tobytes() + b"\0" * 8 + b"\x01" * 68


def content(pairs=PAIRS, infos=INFOS, data=DATA, *, counts=None, version=3, alignment=32) -> bytes:
    counts = counts or (len(infos), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data


def read(tmp_path: pathlib.Path, data: bytes):
    (tmp_path / "m.gguf").write_bytes(data)
    return read_gguf_header(tmp_path / "m.gguf")


def test_metadata_and_tensors(tmp_path):
    header = read(tmp_path, content())
    numbers = header.metadata.pop("a.numbers")
    assert numbers.dtype == np.float32 and numbers.tolist() == [1, 2, 3]
    assert header.metadata == {
        "a.u8": 7, "a.i32": -7, "a.f32": 1e-5, "a.true": True, "a.text": "h\u00e9", "a.words": ["a", "", "c d"]
    }  # fmt: skip
    x, y = header.tensors["x"], header.tensors["y"]
    assert (x.shape, x.dtype, x.blocks, y.shape, y.dtype, y.blocks.name) == ((2, 3), "F32", None, (64,), "F32", "Q8_0")
    assert y.start == x.start + 32 and y.nbytes == 68 and x.start % 32 == 0


def test_alignment_of_the_file(tmp_path):
    data = content((pair("general.alignment", 4, struct.pack("<I", 64)),), INFOS[:1], DATA[:24], alignment=64)
    assert read(tmp_path, data).tensors["x"].start % 64 == 0


@pytest.mark.parametrize("last", PAIRS, ids=["u8", "i32", "f32", "true", "text", "words", "numbers"])
def test_a_file_may_end_with_its_metadata(tmp_path, last):
    """Such as one that holds a vocabulary alone."""
    header = read(tmp_path, content((last,), (), b"", alignment=1))
    assert len(header.metadata) == 1 and not header.tensors


def test_every_shorter_file_is_refused(tmp_path):
    data = content()
    for size in range(len(data)):
        with pytest.raises(InputError, match="m.gguf is"):
            read(tmp_path, data[:size])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + content()[4:], "begin with GGUF"),
        (content(version=1), "a GGUF file of version 1; versions 2 and 3"),
        (content(version=0x03000000), "of a big-endian machine"),
        (content(counts=(2**63, 7)), "claims to hold 9223372036854775808 tensors"),
        (content(counts=(2, 2**40)), "claims to hold 1099511627776 metadata"),
        (content((pair("a", 8, struct.pack("<Q", 2**62)),)), "'a' has 4611686018427387904 bytes, at most"),
        (content((pair("a", 9, struct.pack("<IQ", 8, 2**61)),)), "'a' claims to hold 2305843009213693952 strings"),
        (content((pair("a", 9, struct.pack("<IQ", 12, 2**61)),)), "'a' claims to hold 2305843009213693952 numbers"),
        (content((pair("a", 9, struct.pack("<IQ", 9, 1)),)), "'a' is .* type 9, which .* read"),
        (content((pair("a", 13, b"\0" * 8),)), "'a' has .* type 13"),
        (content((pair("a", 7, b"\2"),)), "'a' is neither true"),
        (content((pair("a", 8, text(b"\xff")),)), "'a' is not UTF-8"),
        (content((pair("a", 9, struct.pack("<IQ", 8, 2) + text(b"b") + text(b"\xff")),)), "string of 'a' is not UTF-8"),
        (content((pair("a\n", 0, b"\0"),)), r"metadata is 'a\\n'"),
        (content((*PAIRS, PAIRS[0])), "holds the key 'a.u8' twice"),
        (content((pair("general.alignment", 4, struct.pack("<I", 48)),)), "general.alignment is 48, expected a power"),
        (content(infos=(INFOS[0], info("x", (64,), 8, 32))), "holds the tensor 'x' twice"),
        (content(infos=(INFOS[0], info("y", (1,) * 5, 8, 32))), "'y' has 5 axes"),
        (content(infos=(INFOS[0], info("y", (60,), 8, 32))), "rows of Q8_0 are multiples of 32"),
        (content(infos=(INFOS[0], info("y", (64,), 40, 32))), "'y' is stored as NVFP4, expected one of F32"),
        (content(infos=(INFOS[0], info("y", (64,), 99, 32))), "'y' is .* type 99"),
        (content(infos=(INFOS[0], info("y", (64,), 8, 33))), "begins at byte 33"),
        (content(infos=(INFOS[0], info("y", (64,), 8, 0))), "'y' overlaps 'x'|'x' overlaps 'y'"),
        (content(infos=(INFOS[0], info("y", (64,), 8, 64))), "ends 32 bytes after"),
        (content(infos=(INFOS[0], info("y", (2**40, 2**40, 32), 8, 32))), "'y' ends"),
        (content(infos=(INFOS[0], info("y", (0, 32), 8, 32))), r"'y' has shape \[0, 32\]"),
        (content() + b"\0" * 64, "end belong"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path, data, message):
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, data)
    assert len(str(caught.value).splitlines()) == 1


def test_files_are_known_by_their_name_or_their_beginning(tmp_path):
    (tmp_path / "blob").write_bytes(content())
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "other").write_bytes(b"{}")
    assert is_gguf(tmp_path / "blob") and is_gguf(tmp_path / "empty.gguf")
    assert not is_gguf(tmp_path / "other") and not is_gguf(tmp_path) and not is_gguf(tmp_path / "none.gguf")
