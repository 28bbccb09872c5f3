"""Reads the arrays of an Orbax checkpoint that is not a database: a folder each, in the format Zarr 2.

Orbax and TensorStore can read them too, but Orbax takes damaged metadata for a checkpoint without arrays, reads the
metadata of all arrays in every call, and holds a large array twice in memory. TensorStore reads a whole chunk where a
part is asked for (a leaf is one chunk: reading 2 MB of an array of 1 GB took 1.1 GB of memory and 1.9 s, here 1 MB and
0.03 s), holds a whole array twice in memory, and reads zeros where the file of a chunk is missing.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import ml_dtypes
import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.files.byte_files import sample_bytes
from moe_jax.files.json_toml import read_json_object
from moe_jax.files.regular_files import Directory, HeldDirectory, fresh, read_box
from moe_jax.files.storage_path import as_path

T = TypeVar("T")

STATE = "state"  # Orbax's name for the only item of a checkpoint
_NAMES = f"{STATE}/_METADATA"
_MAX_NAMES, _MAX_VALUES = 256 << 20, 20_000_000  # some 300 bytes and 15 values per array
_MAX_ARRAY = 1 << 16
OWN_FLOATS = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
"""Floats that NumPy does not have: their names stand for them in metadata."""


Part = tuple[slice, ...]
"""A box of an array: a slice for each axis, of step 1 and with both ends."""


class ZarrArray(NamedTuple):
    """An array of a checkpoint.

    Attributes:
      checkpoint: the directory of the checkpoint.
      folder: the folder of the array, relative to the directory.
      spec: shape and dtype.
      chunks: the shape of its chunks, which divides the shape of the array, if each chunk is a file that holds its
        bytes in C order and nothing else; None: the array is stored in another way.
    """

    checkpoint: Directory
    folder: str
    spec: jax.ShapeDtypeStruct
    chunks: tuple[int, ...] | None

    @property
    def is_raw(self) -> bool:
        """Whether `read` can read it."""
        return self.chunks is not None

    @property
    def nbytes(self) -> int:
        return self.spec.size * np.dtype(self.spec.dtype).itemsize

    def check_size(self) -> None:
        """Raises `InputError` if a file of a raw array is missing, or has not as many bytes as its shape says."""
        counts = (size // chunk for size, chunk in zip(self.spec.shape, self._chunk_shape, strict=True))
        for position in itertools.product(*map(range, counts)):
            self._check_file(self._file(position))

    def _check_file(self, name: str) -> None:
        size = expected = math.prod(self._chunk_shape) * np.dtype(self.spec.dtype).itemsize
        try:
            if isinstance(self.checkpoint, HeldDirectory):
                size = self.checkpoint.size(name)
            else:  # an object that has its last byte has all bytes
                self.checkpoint.read_ranges(name, [(expected - 1, np.empty(1, np.uint8))])
        except FileNotFoundError:
            raise InputError(f"{self.checkpoint.path / name} is missing") from None
        if size != expected:
            raise InputError(
                f"{self.checkpoint.path / name} has {size} bytes, {expected} expected: it is truncated or corrupt"
            )

    def read(self, part: Part | None = None) -> np.ndarray:
        """Returns the content of a raw array, or a part of it; no bytes but those of the part are read.

        In a bucket, the bytes between two pieces of the part are read too where that is quicker than two requests.

        Raises:
          InputError: as in `check_size`.
        """
        part = part or tuple(slice(0, size) for size in self.spec.shape)
        dtype, chunk = np.dtype(self.spec.dtype), self._chunk_shape
        whole = fresh([axis.stop - axis.start for axis in part], dtype)
        lengths = [range(axis.start // size, -(-axis.stop // size)) for axis, size in zip(part, chunk, strict=True)]
        for position in itertools.product(*lengths):
            corner = [index * size for index, size in zip(position, chunk, strict=True)]
            shared = tuple(
                slice(max(axis.start, begin), min(axis.stop, begin + size))
                for axis, begin, size in zip(part, corner, chunk, strict=True)
            )
            of_chunk = tuple(slice(s.start - begin, s.stop - begin) for s, begin in zip(shared, corner, strict=True))
            of_part = tuple(slice(s.start - p.start, s.stop - p.start) for s, p in zip(shared, part, strict=True))
            file = self._file(position)
            if isinstance(self.checkpoint, HeldDirectory):  # an object is written as a whole
                self._check_file(file)
            try:
                read_box(self.checkpoint, file, chunk, of_chunk, whole[of_part] if part else whole)
            except FileNotFoundError:
                raise InputError(f"{self.checkpoint.path / file} is missing") from None
        return whole

    def sample(self) -> bytes:
        """Returns samples of the content of a raw array for its fingerprint; they do not depend on the chunks."""
        return sample_bytes(self.nbytes, self._flat)

    def _flat(self, start: int, length: int) -> bytes:
        """Returns a range of the content's bytes in C order."""
        itemsize, shape = np.dtype(self.spec.dtype).itemsize, self.spec.shape
        begin = first = start // itemsize  # elements
        last = -(-(start + length) // itemsize)
        part: list[slice] = []
        for axis, size in enumerate(shape):
            stride = math.prod(shape[axis + 1 :])
            low, high = first // stride, -(-last // stride)
            part.append(slice(low, high))
            first, last = first - low * stride, last - low * stride
            if high - low > 1:
                part += [slice(0, size) for size in shape[axis + 1 :]]
                break
        content = self.read(tuple(part)).reshape(-1).view(np.uint8)
        skipped = start - begin * itemsize + first * itemsize
        return content[skipped : skipped + length].tobytes()

    def stored_bytes(self) -> int:
        """Returns the number of bytes of a raw array as stored; on a disk with those of its metadata, a few hundred."""
        if not isinstance(self.checkpoint, HeldDirectory):
            return self.nbytes
        return self.nbytes + self.checkpoint.size(f"{self.folder}/.zarray")

    @property
    def _chunk_shape(self) -> tuple[int, ...]:
        assert self.chunks is not None, self.folder
        return self.chunks

    def _file(self, position: Iterable[int]) -> str:
        return f"{self.folder}/{chunk_name(position)}"


def read_zarr_arrays(checkpoint: Directory) -> dict[str, ZarrArray] | None:
    """Returns the arrays of a checkpoint by path ("layers/0/mlp/up/kernel"); None if it is stored in another way.

    Raises:
      InputError: if it is not a complete Orbax checkpoint, or metadata is missing or damaged; the message names the
        file.
    """
    if not checkpoint.is_file(_NAMES):
        raise InputError(f"{checkpoint.path} is not a complete Orbax checkpoint: {_NAMES} is missing")
    names = _read(checkpoint, _NAMES, _MAX_NAMES, _leaf_names)
    if names is None:
        return None
    arrays = as_path(checkpoint.path).map(lambda path: _read_array(checkpoint, array_folder(path)), names)
    return dict(zip(names, arrays, strict=True))


def is_whole(checkpoint: Directory, path: str) -> bool:
    """Whether an array, in a checkpoint that need not be complete, has all its files, whole."""
    try:
        array = _read_array(checkpoint, array_folder(path))
        if array.is_raw:
            array.check_size()
        return array.is_raw
    except InputError:
        return False


def array_folder(path: str) -> str:
    """Returns the folder of an array, relative to the directory of its checkpoint."""
    return f"{STATE}/{path.replace('/', '.')}"


def chunk_name(position: Iterable[int]) -> str:
    """Returns the file of a chunk, by its position in the grid of chunks."""
    return ".".join(map(str, position)) or "0"


def _leaf_names(metadata: dict[str, Any]) -> list[str] | None:
    if metadata.get("use_ocdbt") is not False or metadata.get("use_zarr3") is not False:
        return None
    paths = []
    for leaf in metadata["tree_metadata"].values():
        keys = [key["key"] for key in leaf["key_metadata"]]
        are_texts = bool(keys) and all(isinstance(key, str) for key in keys)
        if not are_texts or not all(key.isprintable() and key.strip(".") and "/" not in key for key in keys):
            raise ValueError("the name of an array")
        paths.append("/".join(keys))
    return paths


def _read_array(checkpoint: Directory, folder: str) -> ZarrArray:
    if not checkpoint.is_file(f"{folder}/.zarray"):
        raise InputError(f"{checkpoint.path / folder / '.zarray'} is missing: a leaf is lost, or its shape")

    def parse(zarr: dict[str, Any]) -> ZarrArray:
        shape, dtype = zarr["shape"], _dtype(zarr["dtype"])
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape) or len(shape) > 32:
            raise ValueError("its shape")
        is_raw = zarr["order"] == "C" and not zarr["compressor"] and not zarr["filters"]
        is_native = not str(zarr["dtype"]).startswith(">") and zarr.get("dimension_separator", ".") == "."
        chunks = tuple(zarr["chunks"])
        # A last chunk that is not full would be filled up in its file.
        is_grid = len(chunks) == len(shape) and all(
            type(chunk) is int and chunk > 0 and size % chunk == 0 for size, chunk in zip(shape, chunks, strict=True)
        )
        raw = chunks if is_raw and is_native and is_grid else None
        return ZarrArray(checkpoint, folder, jax.ShapeDtypeStruct(tuple(shape), dtype), raw)

    return _read(checkpoint, f"{folder}/.zarray", _MAX_ARRAY, parse)


def _dtype(name: object) -> np.dtype:
    if not isinstance(name, str):
        raise ValueError("its dtype")
    dtype = OWN_FLOATS[name] if name in OWN_FLOATS else np.dtype(name)
    if dtype.kind not in "biuf" and name not in OWN_FLOATS:
        raise ValueError("its dtype")
    return dtype


def _read(checkpoint: Directory, file: str, max_bytes: int, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        return parse(read_json_object(Path(file), max_bytes=max_bytes, max_values=_MAX_VALUES, inside=checkpoint))
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{checkpoint.path / file} is damaged: it does not describe arrays as Orbax does") from None
