"""PyTorch's zip checkpoints (`pytorch_model.bin`), read without PyTorch and without running anything they contain.

A checkpoint is a zip with a pickle, `*/data.pkl`, and one uncompressed member per storage, `*/data/<key>`. A pickle is
a program. This one may build strings, numbers, tuples, lists and dictionaries, and may call three functions, by names
that stand for inert ones here; any other name and any other operation is an error. Its cost is proportional to its
length, which is limited: only short strings and small numbers are hashed, and nothing is compared or written out.
"""

import collections
import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.conversion.tensors import (
    DTYPE_BITS,
    MAX_RANK,
    Checksum,
    TensorEntry,
    check_crc,
    check_tensor_name,
    row_major,
)
from moe_jax.core.errors import InputError, first_line, shown
from moe_jax.files.byte_files import ByteFile, open_bytes

_BUFFER_BYTES = 16 << 10
_MAX_TABLE = 8 << 20  # bytes: some hundred thousand members
# Errors that `zipfile` raises for damaged files: impossible names, versions, flags, lengths, positions.
_ZIP_ERRORS = (
    zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, OverflowError, struct.error, OSError,
)  # fmt: skip
# Before the name of a member: signature, version, flags, method, time, date, CRC-32, two sizes, two lengths.
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_NAME_IS_UTF8 = 0x800
_SIZES_FOLLOW = 0x008
_SIZE_ELSEWHERE = 0xFFFFFFFF  # in the ZIP64 field
_MAX_PICKLE_BYTES = 32 << 20
_MAX_OPERATIONS = 1_000_000  # some twenty-five thousand tensors in one file

_STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip


class Storage(NamedTuple):
    """The elements that tensors are views of: their dtype, named as in safetensors, and the KEY of `data/KEY`."""

    dtype: str
    key: str


class StoredTensor(NamedTuple):
    """A view of a storage; offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _StorageType(NamedTuple):
    dtype: str


class _Function(NamedTuple):
    call: Callable[..., Any]


class _Unexpected(Exception):
    """A pickle does something that none of PyTorch's does."""


def read_torch_file(path: Path) -> dict[str, TensorEntry]:
    """Reads the names and positions of the tensors in a checkpoint.

    The bytes of tensors are verified when they are read (`TensorFiles`), all else here.

    Raises:
      InputError: if it is not such a zip, is damaged, or contains anything but tensors.
    """
    with open_bytes(path) as file:
        archive = _Zip(file)
        if "byteorder" in archive and archive.read("byteorder", max_bytes=16) != b"little":
            raise InputError(f"{path} was saved on a big-endian machine, which is not supported")
        data = archive.read("data.pkl", max_bytes=_MAX_PICKLE_BYTES)
        try:
            state = _read_pickle(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        places: dict[Storage, Checksum] = {}
        return {name: _entry(archive, name, tensor, places) for name, tensor in _tensors_of(path, state).items()}


def _tensors_of(path: Path, state: Any) -> dict[str, StoredTensor]:
    # Some trainers save {"state_dict": ...}; otherwise all values must be tensors.
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise InputError(f"{path} holds a {_kind(state)}, expected a dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise InputError(f"{path} holds a {_kind(value)} under {shown(name)}, expected tensors only")
        check_tensor_name(path, name)
    return state


def _entry(archive: "_Zip", name: str, tensor: StoredTensor, places: dict[Storage, Checksum]) -> TensorEntry:
    """Checks that a tensor fits into its storage, and finds its first byte."""
    storage = tensor.storage
    if storage not in places:
        places[storage] = archive.place(f"data/{storage.key}")
    place, itemsize = places[storage], DTYPE_BITS[storage.dtype] // 8
    last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    # A tensor that repeats elements could be of any size, whatever the size of the file.
    needed = max(last + 1, math.prod(tensor.shape)) if 0 not in tensor.shape else 0
    if needed * itemsize > place.size:
        raise archive.damaged(
            f"{shown(name)} takes {shown(needed * itemsize)} bytes of its storage, which has {place.size}"
        )
    start = place.start + tensor.offset * itemsize
    # An axis of length 1 may have any stride.
    expected = zip(tensor.shape, tensor.strides, row_major(tensor.shape), strict=True)
    strides = None if all(n <= 1 or a == b for n, a, b in expected) else tensor.strides
    return TensorEntry(archive.path, storage.dtype, tensor.shape, start, archive.identity, strides, place)


def _kind(value: Any) -> str:
    return type(value).__name__.strip("_")


# --- the zip --------------------------------------------------------------------------------------


class _Zip:
    """The members of a checkpoint, by their names below its root folder. The file is not closed."""

    def __init__(self, file: ByteFile):
        self.path, self.identity, self._whole = file.path, file.identity, file
        self._file = _ShortReads(file)
        infos = _table(self._file, self.path)
        self._members = {info.filename: info for info in infos}
        if len(self._members) < len(infos):
            ((twice, _),) = collections.Counter(info.filename for info in infos).most_common(1)
            raise self.damaged(f"it has two members {shown(twice)}")
        pickles = [name for name in self._members if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(pickles) != 1:
            raise InputError(f"{self.path} is a zip, but not a PyTorch checkpoint: it has {len(pickles)} data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")

    def __contains__(self, name: str) -> bool:
        return self._root + name in self._members

    def place(self, name: str) -> Checksum:
        """Returns the position of the bytes of a member, and their checksum, which is not verified yet."""
        info = self._members.get(self._root + name)
        if info is None:
            raise self.damaged(f"its member {shown(name)} is missing")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise InputError(f"{self.path}: {shown(name)} is compressed, which PyTorch never does; save it again")
        start = self._start(info)
        if start + info.file_size > self._whole.size:
            raise self.damaged(f"its member {shown(name)} ends after the end of the file")
        return Checksum(start, info.file_size, info.CRC)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Returns the content of a small member, verified."""
        place = self.place(name)
        if place.size > max_bytes:
            raise self.damaged(f"its member {shown(name)} has {place.size:,} bytes, more than {max_bytes:,}")
        check_crc(self._whole, place)
        return self._whole.bytes_at(place.start, place.size)

    def damaged(self, what: str) -> InputError:
        """Returns an error that says what is wrong with the file, and what to do."""
        return InputError(f"{self.path} is damaged: {what}; fetch it again")

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Returns the first byte of a member, after its own header, which repeats the fields of the table."""
        # A table that is not where it claims to be leads to positions before the file.
        self._file.seek(max(0, info.header_offset))
        header = self._file.read(_LOCAL_HEADER.size) if info.header_offset >= 0 else b""
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
            raise self.damaged(f"there is no header before its member {shown(info.filename)}")
        _, _, flags, method, _, _, crc, stored, size, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        name = self._file.read(name_length)
        here = (flags, method, name.decode("utf-8" if flags & _NAME_IS_UTF8 else "cp437", "replace"))
        unsaid = (0,) if flags & _SIZES_FOLLOW else ()
        same = here == (info.flag_bits, info.compress_type, info.orig_filename) and crc in (info.CRC, *unsaid)
        if not same or not all(n in (info.file_size, _SIZE_ELSEWHERE, *unsaid) for n in (stored, size)):
            raise self.damaged(f"its two headers of the member {shown(info.filename)} differ")
        return info.header_offset + _LOCAL_HEADER.size + name_length + extra_length


class _UnclosedFile(io.RawIOBase):
    """A file that stays open when the buffer in front of it goes away."""

    def __init__(self, file: ByteFile):
        self.seek, self.tell, self.readinto = file.seek, file.tell, file.readinto

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _table(file: io.BufferedReader, path: Path) -> list[zipfile.ZipInfo]:
    try:
        return zipfile.ZipFile(file).infolist()
    except InputError:
        raise
    except _ZIP_ERRORS as error:
        if isinstance(error, OSError) and error.filename:
            raise  # an error of the disk, not of the file
        raise InputError(
            f"{path} is not a PyTorch zip checkpoint ({shown(first_line(error))}): it is damaged, or older than "
            "PyTorch 1.6; fetch it again, or load and save it with a newer PyTorch"
        ) from None


class _ShortReads(io.BufferedReader):
    """A buffer that returns at most the size of a table of members at a time: `zipfile` reads the table at once."""

    def __init__(self, file: ByteFile):
        super().__init__(_UnclosedFile(file), _BUFFER_BYTES)
        self._path = file.path

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(_MAX_TABLE + 1 if size is None or size < 0 else min(size, _MAX_TABLE + 1))
        if len(content) > _MAX_TABLE:
            raise InputError(f"{self._path} is damaged: its table of members is impossibly large; fetch it again")
        return content


# --- the pickle -----------------------------------------------------------------------------------


def _read_pickle(data: bytes) -> Any:
    """Returns what a pickle builds: `StoredTensor`s in dictionaries, lists and tuples.

    Raises:
      InputError: if it is damaged, wants to run anything, or does what a state dict never needs. The caller puts the
        name of the file before the message.
    """
    try:
        return _run(data)
    except InputError:
        raise
    except _Unexpected as error:
        raise InputError(f"its data.pkl is damaged, or not of plain tensors ({error}); fetch the file again") from None
    except (ValueError, LookupError, TypeError) as error:
        # Errors of `pickletools`, and of operations that find too few values on the stack.
        raise InputError(f"its data.pkl is damaged ({type(error).__name__}); fetch the file again") from None


def _run(data: bytes) -> Any:
    """Runs a pickle, with a stack, marks in it, and a memo; returns the one value that it leaves."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def taken_from(start: int) -> list[Any]:
        items = stack[start:]
        del stack[start:]
        return items

    def last(count: int) -> list[Any]:
        if len(stack) < count:
            raise IndexError
        return taken_from(len(stack) - count)

    operations: Any = pickletools.genops(data)
    for count, (operation, argument, _) in enumerate(operations):
        if count >= _MAX_OPERATIONS:
            raise _Unexpected(f"more than {_MAX_OPERATIONS:,} operations")
        match operation.name:
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(taken_from(marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(last(int(name[-1]))))
            case "REDUCE":
                stack.append(_called(*last(2)))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "GLOBAL":
                stack.append(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_named(*last(2)))
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            case "APPEND":
                _append(last(1), stack[-1])
            case "APPENDS":
                _append(taken_from(marks.pop()), stack[-1])
            case "SETITEM":
                _set_items(last(2), stack[-1])
            case "SETITEMS":
                _set_items(taken_from(marks.pop()), stack[-1])
            case "BUILD":  # the attributes of a state dict (`_metadata`), which nobody needs
                stack.pop()
                if type(stack[-1]) is not dict:
                    raise _Unexpected("attributes of what is no dictionary")
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case name:
                raise _Unexpected(f"the operation {name}")


_CONSTANTS: dict[str, Callable[[], Any]] = {
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False},
    **{"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple},
}


def _append(items: list[Any], target: Any) -> None:
    if type(target) is not list:
        raise _Unexpected("items of what is no list")
    target.extend(items)


def _set_items(items: list[Any], target: Any) -> None:
    if type(target) is not dict or len(items) % 2:
        raise _Unexpected("keys of what is no dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):
            raise _Unexpected(f"a {type(key).__name__.strip('_')} as a key")
        if key in target:
            raise _Unexpected(f"the key {shown(key)} twice")
        target[key] = value


def _called(function: Any, arguments: Any) -> Any:
    if type(function) is not _Function or type(arguments) is not tuple:
        raise _Unexpected("a call of what is no function")
    return function.call(*arguments)


def _named(module: Any, name: Any) -> _Function | _StorageType:
    """Returns the function or type of this name, if it is allowed."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise _Unexpected("a name that is no string")
    if module == "torch" and name in _STORAGES:
        return _StorageType(_STORAGES[name])
    if (module, name) in _FUNCTIONS:
        return _FUNCTIONS[module, name]
    raise InputError(
        f"it wants to run {shown(f'{module}.{name}')[1:-1]}; only plain tensors are read. "
        "If you trust it, load it with PyTorch and save it as safetensors"
    )


def _storage(reference: Any) -> Storage:
    """Returns the storage that a persistent id describes."""
    kind, storage_type, key, _device, _count = reference
    if kind != "storage" or type(storage_type) is not _StorageType or not isinstance(key, str):
        raise _Unexpected("a reference to something else than a storage")
    return Storage(storage_type.dtype, key)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    if type(storage) is not Storage:
        raise _Unexpected("a tensor without a storage")
    if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= MAX_RANK:
        raise _Unexpected("a tensor without one stride for every axis")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *shape, *strides)):
        raise _Unexpected(f"a tensor with offset {shown(offset)}, shape {shown(shape)}, strides {shown(strides)}")
    return StoredTensor(storage, offset, shape, strides)


_FUNCTIONS = {
    ("collections", "OrderedDict"): _Function(lambda: {}),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_rebuild_tensor),
    ("torch._utils", "_rebuild_parameter"): _Function(lambda data, *_: data),
}
