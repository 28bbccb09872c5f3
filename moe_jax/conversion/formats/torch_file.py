"""PyTorch's zip checkpoints (`pytorch_model.bin`), read without PyTorch and without running anything they contain.

A checkpoint is a zip with a pickle, `*/data.pkl`, and one uncompressed member per storage, `*/data/<key>`.
"""

import collections
import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from moe_jax.conversion.formats.tensors import (
    DTYPE_BITS,
    Checksum,
    TensorEntry,
    check_crc,
    check_tensor_name,
    row_major,
)
from moe_jax.conversion.formats.torch_pickle import MAX_PICKLE_BYTES, Storage, StoredTensor, read_torch_pickle
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


class TorchZip:
    """The members of a checkpoint, by their names below its root folder.

    Attributes:
      path: of the file.
      identity: of the file.
    """

    def __init__(self, file: ByteFile):
        """Reads the table of members.

        Args:
          file: the open file; it is not closed.

        Raises:
          InputError: if it is no zip, has two members of one name, or holds not exactly one `data.pkl`.
        """
        self.path, self.identity, self._whole = file.path, file.identity, file
        # Headers of members are a few bytes each.
        self._file = io.BufferedReader(_UnclosedFile(file), _BUFFER_BYTES)
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
        """Returns the position of the bytes of a member, and their checksum, which is not verified yet.

        Raises:
          InputError: if it is missing, compressed or encrypted, or its two headers differ.
        """
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
        """Returns the content of a small member, verified.

        Raises:
          InputError: as `place`; or if it is larger than `max_bytes`, or its checksum is wrong.
        """
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
        same = here == (info.flag_bits, info.compress_type, info.orig_filename)
        unsaid = (0,) if flags & _SIZES_FOLLOW else ()
        same = same and crc in (info.CRC, *unsaid)
        same = same and all(n in (info.file_size, _SIZE_ELSEWHERE, *unsaid) for n in (stored, size))
        if not same:
            raise self.damaged(f"its two headers of the member {shown(info.filename)} differ")
        return info.header_offset + _LOCAL_HEADER.size + name_length + extra_length


class _UnclosedFile(io.RawIOBase):
    """A file that stays open when the buffer in front of it goes away."""

    def __init__(self, file: ByteFile):
        self._file = file
        self.seek, self.tell, self.readinto = file.seek, file.tell, file.readinto

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _table(file: BinaryIO, path: Path) -> list[zipfile.ZipInfo]:
    try:
        return zipfile.ZipFile(_ShortReads(path, file)).infolist()  # type: ignore[arg-type]
    except InputError:
        raise
    except _ZIP_ERRORS as error:
        if isinstance(error, OSError) and error.filename:
            raise  # an error of the disk, not of the file
        reason = shown(first_line(error))
        raise InputError(
            f"{path} is not a PyTorch zip checkpoint ({reason}): it is damaged, or older than PyTorch 1.6; "
            "fetch it again, or load and save it with a newer PyTorch"
        ) from None


class _ShortReads:
    """A file that returns at most the size of a table of members at a time: `zipfile` reads the table at once."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file = path, file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """Reads bytes; raises `InputError` for more than a table of members may have."""
        content = self._file.read(_MAX_TABLE + 1 if size < 0 else min(size, _MAX_TABLE + 1))
        if len(content) > _MAX_TABLE:
            raise InputError(f"{self._path} is damaged: its table of members is impossibly large; fetch it again")
        return content


def read_torch_file(path: Path) -> dict[str, TensorEntry]:
    """Reads the names and positions of the tensors in a checkpoint.

    The bytes of tensors are verified when they are read (`TensorFiles`), all else here.

    Raises:
      InputError: if it is not such a zip, is damaged, or contains anything but tensors.
    """
    with open_bytes(path) as file:
        archive = TorchZip(file)
        if "byteorder" in archive and archive.read("byteorder", max_bytes=16) != b"little":
            raise InputError(f"{path} was saved on a big-endian machine, which is not supported")
        data = archive.read("data.pkl", max_bytes=MAX_PICKLE_BYTES)
        try:
            state = read_torch_pickle(data)
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


def _entry(archive: TorchZip, name: str, tensor: StoredTensor, places: dict[Storage, Checksum]) -> TensorEntry:
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
    strides = None if _is_row_major(tensor) else tensor.strides
    return TensorEntry(archive.path, storage.dtype, tensor.shape, start, archive.identity, strides, place)


def _is_row_major(tensor: StoredTensor) -> bool:
    """Whether the strides are those of a contiguous tensor; an axis of length 1 may have any."""
    expected = row_major(tensor.shape)
    return all(n <= 1 or a == b for n, a, b in zip(tensor.shape, tensor.strides, expected, strict=True))


def _kind(value: Any) -> str:
    return type(value).__name__.strip("_")
