"""Fingerprints of files and weights, fast enough for checkpoints of any size."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import jax
import numpy as np

from moe_jax.remote.remote_path import BucketPath

_PIECE = 1 << 16
_PIECES = 16


def sample_file(file: Path) -> bytes:
    """The size of a file and its content: all of it up to 1 MiB, 16 evenly spread pieces of 64 KiB if it is larger."""
    if isinstance(file, BucketPath):
        return sample_array(np.frombuffer(file.read_bytes(), np.uint8))
    with open(file, "rb") as handle:
        return sample_open(handle)


def sample_open(file: BinaryIO) -> bytes:
    """What `sample_file` returns, of a file that is open."""

    def read(start: int, length: int) -> bytes:
        file.seek(start)
        return file.read(length)

    return sample_bytes(os.fstat(file.fileno()).st_size, read)


def sample_array(array: np.ndarray) -> bytes:
    """What `sample_file` returns for a file that holds just this array in C order."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return sample_bytes(array.nbytes, lambda start, length: content[start : start + length].tobytes())


def fingerprint_leaves(specs: Mapping[str, jax.ShapeDtypeStruct], sample: Callable[[str], bytes]) -> str:
    """A SHA-256 of the names, shapes and dtypes of leaves, and of their contents as sampled by `sample`."""
    digest = hashlib.sha256()
    for path, spec in sorted(specs.items()):
        digest.update(f"{path} {spec.shape} {spec.dtype}\n".encode())
        digest.update(sample(path))
    return digest.hexdigest()


def fingerprint_files(files: Iterable[Path]) -> str:
    """A SHA-256 of the names, sizes and samples of files, whatever their order and folder."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}\n".encode())
        digest.update(hashlib.sha256(sample_file(file)).digest())
    return digest.hexdigest()


def fingerprint_contents(files: Iterable[Path]) -> str:
    """A SHA-256 of the sizes and samples of files in their order, whatever they are called."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(sample_file(file)).digest())
    return digest.hexdigest()


def sample_bytes(size: int, read: Callable[[int, int], bytes]) -> bytes:
    """What `sample_file` returns, of `size` bytes that are read by their start and length."""
    header = f"{size}\n".encode()
    if size <= _PIECE * _PIECES:
        return header + read(0, size)
    starts = ((size - _PIECE) * piece // (_PIECES - 1) for piece in range(_PIECES))
    return b"".join([header, *(read(start, _PIECE) for start in starts)])
