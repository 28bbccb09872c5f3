"""Bytes of the tensors of a model as they are stored, without headers, metadata and tokenizer."""

import json
import math
import struct
from pathlib import Path

import jax.numpy as jnp

from moe_jax.model_io.model_dir import ModelDirectory

PARAMS = "params"


def stored_bytes(path: Path) -> int:
    """The bytes of all tensors of a GGUF file, a model directory, or a folder of safetensors."""
    if path.is_file():
        from gguf import GGUFReader

        return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)
    if (path / PARAMS).is_dir():
        specs = ModelDirectory(path).specs().values()
        return sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in specs)
    return sum(_in_safetensors(file) for file in path.glob("*.safetensors"))


def _in_safetensors(file: Path) -> int:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    ends = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return sum(end - start for start, end in ends)
