"""Scalars as TensorBoard events, encoded here because the usual writers depend on PyTorch or TensorFlow.

An event file is a sequence of TFRecords: length (uint64), masked CRC-32C of the length, data, masked CRC-32C of the
data, all little-endian. The data is a protocol buffer `tensorflow.Event` (tensorflow/core/util/event.proto).
"""

import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from moe_jax.files.storage_path import as_path


class EventWriter:
    """Appends scalars to a new event file in a directory.

    Args:
      directory: created if necessary. In a bucket the file is there when it is closed, and as far as it was flushed.
      first_step: TensorBoard no longer shows steps from here on that are in older files of the directory.
    """

    def __init__(self, directory: Path, *, first_step: int):
        self._folder = as_path(directory).local_folder()
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder.path / name).open("ab")
        self._write(_string(3, b"brain.Event:2"))
        # A session log with status START: TensorBoard then drops the steps that an interrupted run wrote beyond it.
        self._write(_integer(2, first_step) + _string(7, _integer(1, 1)))

    def write(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Writes the scalars of a step, by tag."""
        values = b"".join(
            _string(1, _string(1, tag.encode()) + _key(2, 5) + struct.pack("<f", value)) for tag, value in scalars
        )
        self._write(_integer(2, step) + _string(5, values))
        self._file.flush()

    def flush(self) -> None:
        """Returns when all is in its place."""
        self._folder.flush()

    def close(self) -> None:
        self._file.close()
        self._folder.close()

    def _write(self, event: bytes) -> None:
        data = _key(1, 1) + struct.pack("<d", time.time()) + event
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _integer(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _string(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    groups = []
    while True:
        value, group = value >> 7, value & 0x7F
        groups.append(group | (0x80 if value else 0))
        if not value:
            return bytes(groups)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32 with the Castagnoli polynomial, as in RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
