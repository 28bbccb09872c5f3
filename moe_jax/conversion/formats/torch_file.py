"""PyTorch's zip checkpoints (`pytorch_model.bin`), read without PyTorch and without running anything they contain.

A checkpoint is a zip with a pickle, `*/data.pkl`, and one uncompressed member per storage, `*/data/<key>`.
"""

import math
from pathlib import Path
from typing import Any

from moe_jax.conversion.formats.tensors import DTYPE_BITS, Checksum, TensorEntry, check_tensor_name, row_major
from moe_jax.conversion.formats.torch_pickle import MAX_PICKLE_BYTES, Storage, StoredTensor, read_torch_pickle
from moe_jax.conversion.formats.torch_zip import TorchZip
from moe_jax.core.errors import InputError, shown
from moe_jax.files.byte_files import open_bytes


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
