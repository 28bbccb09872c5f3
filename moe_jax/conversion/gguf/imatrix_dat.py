"""The older form of llama.cpp's files of the importance of inputs, called `.dat`.

    Int32: number of matrices
    matrices: Int32 length of the name, the name, Int32 calls, Int32 number of values, Float32 values [experts * in]
    Int32 number of chunks, Int32 length of the name of the text, the name: not in all files

A value divided by the number of calls is a second moment. Source:
https://github.com/ggml-org/llama.cpp/blob/master/common/imatrix-loader.cpp.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_jax.conversion.gguf.gguf_header import MAX_TENSORS
from moe_jax.core.errors import InputError, shown
from moe_jax.files.byte_files import ByteFile, open_bytes

MADE_WITH_ANOTHER = "it was made with another model"
_MAX_NAME = 1000


def experts_and_inputs(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns of how many experts a matrix [out, in], or a stack of them, has inputs, and how many each has."""
    return (shape[0] if len(shape) == 3 else 1), shape[-1]


def read_dat(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Reads second moments, Float32[experts, in], by the names of matrices, whose `shapes` are given; see `imatrix`.

    Raises:
      InputError: if it is no such file, or is damaged, or of another model, or its numbers are not finite.
    """
    with open_bytes(path) as file:
        source = _Source(path, file)
        entries = source.number("the number of matrices", 1, MAX_TENSORS)
        names, found = set[str](), dict[str, np.ndarray]()
        for _ in range(entries):
            name = source.text(source.number("the length of a name", 1, _MAX_NAME))
            if name in names:
                raise source.bad(f"{shown(name)} is in it twice")
            names.add(name)
            calls = source.number(f"the number of calls of {shown(name)}", 0, 2**31 - 1)
            count = source.number(f"the number of values of {shown(name)}", 1, source.left() // 4 - 1)
            shape = shapes.get(name)
            if shape is None:
                source.position += 4 * count
                continue
            experts, inputs = experts_and_inputs(shape)
            if count != experts * inputs:
                raise InputError(
                    f"{path}: {name} has {count:,} values, expected {experts:,} x {inputs:,}: {MADE_WITH_ANOTHER}"
                )
            values = np.frombuffer(source.take(4 * count), "<f4").reshape(experts, inputs)
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise InputError(f"{path}: {name} holds numbers that are no sums of squares; make the file again")
            found[name] = values / np.float32(max(1, calls))
        source.check_end()
    return found


class _Source:
    """Takes bytes from a file, never more than it has."""

    def __init__(self, path: Path, file: ByteFile):
        self._path, self._file, self._size = path, file, file.size
        self.position = 0

    def bad(self, why: str) -> InputError:
        return InputError(f"{self._path} is no imatrix, neither a GGUF file nor one of the older form: {why}")

    def left(self) -> int:
        return self._size - self.position

    def take(self, count: int) -> bytes:
        if count > self.left():
            raise self.bad(f"it ends after {self._size:,} bytes, in the middle of a matrix")
        found = self._file.bytes_at(self.position, count)
        self.position += count
        return found

    def number(self, what: str, least: int, most: int) -> int:
        value = int.from_bytes(self.take(4), "little", signed=True)
        if not least <= value <= most:
            raise self.bad(f"{what} is {value:,}")
        return value

    def text(self, count: int) -> str:
        try:
            return self.take(count).decode()
        except UnicodeDecodeError:
            raise self.bad("a name in it is no UTF-8") from None

    def check_end(self) -> None:
        """Raises `InputError` unless nothing follows, or the number of chunks and perhaps the name of a text."""
        if not self.left():
            return
        self.number("the number of chunks", -(2**31), 2**31 - 1)
        if self.left():
            self.take(self.number("the length of the name of the text", 0, self.left() - 4))
        if self.left():
            raise self.bad(f"{self.left():,} bytes at its end belong to nothing")
