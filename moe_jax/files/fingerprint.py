"""Fingerprints of files and weights, fast enough for checkpoints of any size."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from moe_jax.files.byte_files import ByteFile, open_bytes

_PIECE = 1 << 16
_PIECES = 16
_AT_ONCE = 8


def sample_file(file: Path) -> bytes:
    """Returns the size of a file and its content: all of it up to 1 MiB, else 16 evenly spread pieces of 64 KiB."""
    with open_bytes(file) as handle:
        return sample_open(handle)


def sample_open(file: ByteFile) -> bytes:
    """Returns the same bytes as `sample_file`, for a file that is open."""
    return sample_bytes(file.size, file.bytes_at)


def sample_array(array: np.ndarray) -> bytes:
    """Returns the same bytes as `sample_file` for a file that holds only this array in C order."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return sample_bytes(array.nbytes, lambda start, length: content[start : start + length].tobytes())


def fingerprint_leaves(specs: Mapping[str, jax.ShapeDtypeStruct], sample: Callable[[str], bytes]) -> str:
    """Returns a SHA-256 of the names, shapes and dtypes of leaves, and of their contents as sampled by `sample`."""
    digest = hashlib.sha256()
    for path, spec in sorted(specs.items()):
        digest.update(f"{path} {spec.shape} {spec.dtype}\n".encode())
        digest.update(sample(path))
    return digest.hexdigest()


def fingerprint_files(files: Iterable[Path]) -> str:
    """Returns a SHA-256 of the names, sizes and samples of files, whatever their order and folder."""
    digest = hashlib.sha256()
    files = sorted(files, key=lambda file: file.name)
    for file, sample in zip(files, _hashed_samples(files), strict=True):
        digest.update(f"{file.name}\n".encode())
        digest.update(sample)
    return digest.hexdigest()


def fingerprint_contents(files: Iterable[Path]) -> str:
    """Returns a SHA-256 of the sizes and samples of files in their order, whatever they are called."""
    digest = hashlib.sha256()
    for sample in _hashed_samples(list(files)):
        digest.update(sample)
    return digest.hexdigest()


def _hashed_samples(files: Sequence[Path]) -> list[bytes]:
    """Returns the hashed samples of files. Reads several at the same time: those in buckets take many requests."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda file: hashlib.sha256(sample_file(file)).digest(), files))


def sample_bytes(size: int, read: Callable[[int, int], bytes]) -> bytes:
    """Returns the same bytes as `sample_file`, for `size` bytes that `read` returns by their start and length."""
    header = f"{size}\n".encode()
    if size <= _PIECE * _PIECES:
        return header + read(0, size)
    starts = ((size - _PIECE) * piece // (_PIECES - 1) for piece in range(_PIECES))
    return b"".join([header, *(read(start, _PIECE) for start in starts)])
