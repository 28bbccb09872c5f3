"""The arrays of an Orbax checkpoint that is not a database: a folder each, in the format Zarr 2.

Orbax would read them too. But it takes damaged metadata for a checkpoint without arrays, reads the metadata of all
arrays in every call, and a large array twice into memory.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import ml_dtypes
import numpy as np

from moe_jax.errors import InputError
from moe_jax.fingerprint import sample_open
from moe_jax.json_toml import read_json_object
from moe_jax.regular_files import HeldDirectory, open_regular

T = TypeVar("T")

STATE = "state"  # Orbax's name for the only item of a checkpoint
_NAMES = f"{STATE}/_METADATA"
_MAX_NAMES, _MAX_VALUES = 256 << 20, 20_000_000  # some 300 bytes and 15 values per array
_MAX_ARRAY = 1 << 16
_FLOATS = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


class ZarrArray(NamedTuple):
    """One array.

    Attributes:
      checkpoint: the directory of the checkpoint.
      folder: of the array, below it.
      spec: shape and dtype.
      is_raw: whether its only chunk is a file that holds its bytes in C order and nothing else.
    """

    checkpoint: HeldDirectory
    folder: str
    spec: jax.ShapeDtypeStruct
    is_raw: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * np.dtype(self.spec.dtype).itemsize

    def check_size(self) -> None:
        """Raises `InputError` if the file of a raw array is missing, or has not as many bytes as its shape says."""
        try:
            size = self.checkpoint.size(self._chunk)
        except FileNotFoundError:
            raise InputError(f"{self.checkpoint.path / self._chunk} is missing") from None
        if size != self.nbytes:
            raise InputError(
                f"{self.checkpoint.path / self._chunk} has {size} bytes, {self.nbytes} expected: "
                "it is truncated or corrupt"
            )

    def read(self) -> np.ndarray:
        """The content of a raw array.

        Raises:
          InputError: see `check_size`.
        """
        self.check_size()
        with open_regular(self._chunk, inside=self.checkpoint) as file:
            content = np.fromfile(file, np.uint8, count=self.nbytes)
        if content.nbytes != self.nbytes:
            raise InputError(f"{self.checkpoint.path / self._chunk} was cut while it was read")
        return content.view(self.spec.dtype).reshape(self.spec.shape)

    def sample(self) -> bytes:
        """Samples of the content of a raw array, to know it again."""
        self.check_size()
        with open_regular(self._chunk, inside=self.checkpoint) as file:
            return sample_open(file)

    def stored_bytes(self) -> int:
        """Bytes of a raw array on disk, a few hundred of metadata among them."""
        return self.nbytes + self.checkpoint.size(f"{self.folder}/.zarray")

    @property
    def _chunk(self) -> str:
        return f"{self.folder}/{'.'.join('0' for _ in self.spec.shape or [1])}"


def read_zarr_arrays(checkpoint: HeldDirectory) -> dict[str, ZarrArray] | None:
    """The arrays of a checkpoint by path ("layers/0/mlp/up/kernel"); None if it is stored in another way.

    Raises:
      InputError: if it is not a complete Orbax checkpoint, or metadata is missing or damaged; the message names the
        file.
    """
    if not checkpoint.is_file(_NAMES):
        raise InputError(f"{checkpoint.path} is not a complete Orbax checkpoint: {_NAMES} is missing")
    names = _read(checkpoint, _NAMES, _MAX_NAMES, _leaf_names)
    if names is None:
        return None
    return {path: _read_array(checkpoint, f"{STATE}/{path.replace('/', '.')}") for path in names}


def _leaf_names(metadata: dict[str, Any]) -> list[str] | None:
    if metadata.get("use_ocdbt") is not False or metadata.get("use_zarr3") is not False:
        return None
    paths = []
    for leaf in metadata["tree_metadata"].values():
        keys = [key["key"] for key in leaf["key_metadata"]]
        if not keys or not all(map(_is_name, keys)):
            raise ValueError("the name of an array")
        paths.append("/".join(keys))
    return paths


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.isprintable() and bool(key.strip(".")) and "/" not in key


def _read_array(checkpoint: HeldDirectory, folder: str) -> ZarrArray:
    if not checkpoint.is_file(f"{folder}/.zarray"):
        raise InputError(f"{checkpoint.path / folder / '.zarray'} is missing: a leaf is lost, or its shape")

    def parse(zarr: dict[str, Any]) -> ZarrArray:
        shape, dtype = zarr["shape"], _dtype(zarr["dtype"])
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape) or len(shape) > 32:
            raise ValueError("its shape")
        is_raw = zarr["chunks"] == shape and zarr["order"] == "C" and not zarr["compressor"] and not zarr["filters"]
        is_native = not str(zarr["dtype"]).startswith(">")
        return ZarrArray(checkpoint, folder, jax.ShapeDtypeStruct(tuple(shape), dtype), is_raw and is_native)

    return _read(checkpoint, f"{folder}/.zarray", _MAX_ARRAY, parse)


def _dtype(name: object) -> np.dtype:
    if not isinstance(name, str):
        raise ValueError("its dtype")
    dtype = _FLOATS[name] if name in _FLOATS else np.dtype(name)
    if dtype.kind not in "biuf" and name not in _FLOATS:
        raise ValueError("its dtype")
    return dtype


def _read(checkpoint: HeldDirectory, file: str, max_bytes: int, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        return parse(read_json_object(Path(file), max_bytes=max_bytes, max_values=_MAX_VALUES, inside=checkpoint))
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{checkpoint.path / file} is damaged: it does not describe arrays as Orbax does") from None
