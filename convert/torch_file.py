"""PyTorch's zip checkpoints (`pytorch_model.bin`), read without PyTorch and without running anything they contain.

A checkpoint is a zip with a pickle, `*/data.pkl`, and one uncompressed member per storage, `*/data/<key>`.
A pickle is a program. This reader allows only the names that rebuild tensors, and replaces each by an inert
class or function of this file; any other name is an error.
"""

import errno
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.convert.tensors import DTYPE_BITS, TensorEntry, row_major
from moe_jax.errors import InputError

_STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
# What `zipfile` raises for damaged files: impossible names, versions, flags, lengths, positions.
_ZIP_ERRORS = (
    zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, OverflowError, struct.error, OSError,
)  # fmt: skip
_ZIP_LOCAL_HEADER = 30  # bytes before the name, fixed by the format


class _StorageType(NamedTuple):
    dtype: str


class _Storage(NamedTuple):
    dtype: str
    key: str
    count: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Inert(NamedTuple):
    """A callable without attributes of its own, so that a pickle can call it but not change it."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _Dict(dict):
    """Replaces OrderedDict. A state dict has `_metadata`, which unpickling sets as an attribute."""


def read_torch_file(path: Path) -> dict[str, TensorEntry]:
    """Reads the names and positions of the tensors in a checkpoint.

    Raises:
      InputError: if it is not such a zip, is damaged, or contains anything but tensors.
    """
    try:
        return _read(path)
    except InputError:
        raise
    except _ZIP_ERRORS as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # an error of the disk, not of the file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is not a PyTorch zip checkpoint ({reason}): it is damaged, or older than PyTorch 1.6; "
            "fetch it again, or load and save it with a newer PyTorch"
        ) from None


def _read(path: Path) -> dict[str, TensorEntry]:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(pickles) != 1:
            raise InputError(f"{path} is a zip, but not a PyTorch checkpoint: it has {len(pickles)} data.pkl")
        if members[pickles[0]].compress_type != zipfile.ZIP_STORED:
            raise InputError(f"{path}: its data.pkl is compressed, which PyTorch never does; fetch the file again")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}byteorder" in members and archive.read(f"{root}byteorder") != b"little":
            raise InputError(f"{path} was saved on a big-endian machine, which is not supported")
        state = _unpickle(path, archive.read(pickles[0]))
    with open(path, "rb") as file:
        starts: dict[str, int] = {}
        return {
            name: _entry(path, file, name, tensor, members, root, starts)
            for name, tensor in _tensors_of(path, state).items()
        }


def _tensors_of(path: Path, state: Any) -> dict[str, _Tensor]:
    # Some trainers save {"state_dict": ...}; otherwise all values must be tensors.
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise InputError(f"{path} holds a {type(state).__name__.strip('_')}, expected a dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, _Tensor):
            raise InputError(f"{path} holds {type(value).__name__.strip('_')} under {name!r}, expected tensors only")
    return state


def _entry(
    path: Path,
    file: io.BufferedReader,
    name: str,
    tensor: _Tensor,
    members: dict[str, zipfile.ZipInfo],
    root: str,
    starts: dict[str, int],
) -> TensorEntry:
    """Checks that a tensor fits into its storage, and finds its first byte."""
    storage = tensor.storage
    info = members.get(f"{root}data/{storage.key}")
    if info is None:
        raise InputError(f"{path}: the storage of {name!r}, data/{storage.key}, is missing; fetch the file again")
    if info.compress_type != zipfile.ZIP_STORED:
        raise InputError(f"{path}: the storage of {name!r} is compressed; save it again with torch.save")
    itemsize = DTYPE_BITS[storage.dtype] // 8
    last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    if 0 not in tensor.shape and (last + 1) * itemsize > info.file_size:
        raise InputError(
            f"{path}: {name!r} reaches to byte {(last + 1) * itemsize} of its storage, which has {info.file_size}; "
            "fetch the file again"
        )
    if storage.key not in starts:
        starts[storage.key] = _data_start(path, file, info)
    strides = None if _is_row_major(tensor) else tensor.strides
    return TensorEntry(path, storage.dtype, tensor.shape, starts[storage.key] + tensor.offset * itemsize, strides)


def _is_row_major(tensor: _Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor; an axis of length 1 may have any."""
    expected = row_major(tensor.shape)
    return all(n <= 1 or a == b for n, a, b in zip(tensor.shape, tensor.strides, expected, strict=True))


def _data_start(path: Path, file: io.BufferedReader, info: zipfile.ZipInfo) -> int:
    """First byte of a member's data, after a local header of variable length."""
    file.seek(info.header_offset)
    header = file.read(_ZIP_LOCAL_HEADER)
    if len(header) < _ZIP_LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise InputError(f"{path}: member {info.filename!r} is damaged; fetch the file again")
    name_length, extra_length = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    start = info.header_offset + _ZIP_LOCAL_HEADER + name_length + extra_length
    file.seek(0, io.SEEK_END)
    if start + info.file_size > file.tell():
        raise InputError(f"{path}: member {info.filename!r} ends after the end of the file; fetch the file again")
    return start


def _unpickle(path: Path, data: bytes) -> Any:
    try:
        return _TensorUnpickler(path, io.BytesIO(data)).load()
    except InputError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{path}: its data.pkl is damaged ({type(error).__name__}); fetch the file again") from None


class _TensorUnpickler(pickle.Unpickler):
    """Knows the names that a state dict needs, and no others."""

    def __init__(self, path: Path, file: io.BytesIO):
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        known = {
            ("collections", "OrderedDict"): _Inert(_Dict),
            ("torch._utils", "_rebuild_tensor_v2"): _Inert(_rebuild_tensor),
            ("torch._utils", "_rebuild_parameter"): _Inert(_rebuild_parameter),
        }
        if (module, name) not in known:
            raise InputError(
                f"{self._path} wants to run {module}.{name}; only plain tensors are read. "
                "If you trust it, load it with PyTorch and save it as safetensors"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        kind, storage_type, key, _, count = pid
        if kind != "storage" or not isinstance(storage_type, _StorageType) or not isinstance(key, str):
            raise InputError(f"{self._path}: its data.pkl refers to {pid!r}, expected a storage")
        return _Storage(storage_type.dtype, key, count)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    counts = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(n) is int and n >= 0 for n in counts):
        raise InputError(f"a tensor in a PyTorch file has offset {offset}, shape {shape}, strides {strides}")
    if len(shape) != len(strides):
        raise InputError(f"a tensor in a PyTorch file has shape {shape}, but strides {strides}")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data
