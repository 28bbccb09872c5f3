"""`GGUFFile`: a GGUF file that is planned first, then filled in any order, a few rows at a time."""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from moe_jax.conversion.gguf.blocks.k_layouts import K_LAYOUTS
from moe_jax.conversion.gguf.blocks.k_quants import k_quantized
from moe_jax.conversion.gguf.blocks.scaled_blocks import SCALED_BLOCKS, scaled_blocks
from moe_jax.conversion.gguf.gguf_types import BLOCKS_BY_NAME, NUMBERS, Planned
from moe_jax.conversion.tensors import DTYPES
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.files.large_writes import write_at

_ALIGNMENT = 32  # of tensors, in bytes, where the metadata do not say another
WEIGHTED = (*K_LAYOUTS, *SCALED_BLOCKS)
"""The types whose blocks depend on the importance of inputs."""
_WITH_MINIMA = ("Q4_1", "Q5_1")


class GGUFFile(contextlib.AbstractContextManager):
    """Writes a planned file; what was written to an existing one of the same plan stays. A context manager."""

    def __init__(
        self,
        path: Path,
        header: bytes,
        tensors: Mapping[str, Planned],
        importance: Mapping[str, np.ndarray] = {},
    ):
        """Touches nothing yet; the `header` is from `header_of`, for the same tensors; `importance` from `imatrix`."""
        self._path, self._header, self._tensors, self._importance = path, header, tensors, importance
        self._starts: dict[str, int] = {}
        position = _aligned(len(header))
        for name, tensor in tensors.items():
            self._starts[name] = position
            position = _aligned(position + tensor.nbytes)
        self.size = position

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        os.ftruncate(self._descriptor, self.size)
        write_at(self._descriptor, self._header, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.sync()
        finally:
            os.close(self._descriptor)

    def write(self, name: str, offset: int, values: np.ndarray) -> int:
        """Writes whole rows of a tensor, from element `offset` on; returns the number of bytes that it took.

        The values are in the tensor's type or float32, in which blocks are made of them. Safe to call from several
        threads for different rows.

        Raises:
          InputError: if the tensor's type cannot hold the values.
        """
        tensor = self._tensors[name]
        if tensor.blocks is None:
            values = cast(name, values, plain_dtype(tensor))
            content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        else:
            try:
                rows = values.reshape(-1, tensor.shape[-1])
                content = quantized(rows, tensor.kind, self._importance_of(name, offset)).reshape(-1)
            except InputError as error:
                raise InputError(f"{name}: {error}") from None
        assert content.size == tensor.stored_bytes(values.size), (name, content.size)
        write_at(self._descriptor, content, self._starts[name] + tensor.stored_bytes(offset))
        return content.size

    def _importance_of(self, name: str, offset: int) -> np.ndarray | None:
        """The importance of the columns of the matrix that an element belongs to; None: it is not known."""
        importance, shape = self._importance.get(name), self._tensors[name].shape
        return None if importance is None else importance[offset // math.prod(shape[-2:])]

    def sync(self) -> bool:
        """Waits until the written bytes are on disk."""
        os.fsync(self._descriptor)
        return True

    def are_kept(self, names: Iterable[str]) -> bool:
        """Returns False: the notes of the work say what is written."""
        return False


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def header_of(architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Planned]) -> bytes:
    """Returns the header of a file with these tensors, in their order.

    Values of the metadata are true or false, integers (of 32 bits), floats (of 32 bits), texts, and lists of integers,
    floats or texts.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    with tempfile.TemporaryDirectory(prefix="moe-jax-") as folder:
        file = Path(folder) / "header"
        writer = GGUFWriter(file, architecture)
        for key, value in metadata.items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case _:
                    writer.add_array(key, value)
        for name, tensor in tensors.items():
            kind = GGMLQuantizationType(NUMBERS[tensor.kind])
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return file.read_bytes()


def quantized(rows: np.ndarray, kind: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Returns rows, Float32[r, n], in blocks of a type, UInt8[r * n / numbers of a block, bytes of a block].

    The `importance` of columns, Float32[n], is for the types that are `WEIGHTED`: see `k_quantized`. Without it,
    Q4_0 to Q5_1 are rounded as llama.cpp does.

    Raises:
      InputError: for numbers that are not finite, or that are too large for scales in halves.
    """
    if kind in K_LAYOUTS:
        return k_quantized(rows, kind, importance)
    if kind in SCALED_BLOCKS and importance is not None:
        return scaled_blocks(rows, kind, importance)
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    blocks = BLOCKS_BY_NAME[kind]
    with np.errstate(all="ignore"):  # what becomes infinite is found below
        made = quantize(np.ascontiguousarray(rows, np.float32), GGMLQuantizationType[kind])
    made = made.reshape(math.prod(rows.shape) // blocks.elements, blocks.nbytes)
    halves = made[:, : 4 if kind in _WITH_MINIMA else 2]  # a block begins with its scale, and then its minimum
    if not np.isfinite(np.ascontiguousarray(halves).view("<f2")).all():
        raise InputError(f"it holds numbers that {kind}, whose scales are halves, cannot hold; choose F32 or BF16")
    return made


def plain_dtype(tensor: Planned) -> np.dtype:
    """Returns the dtype in which `GGUFFile.write` takes a tensor's values."""
    return DTYPES.get(tensor.kind, DTYPES["F32"])
