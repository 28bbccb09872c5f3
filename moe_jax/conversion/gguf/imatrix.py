"""The importance of inputs, from a file of llama.cpp's `llama-imatrix` (an "importance matrix", as GGUF).

For every matrix it has the sum of the squares of each of its inputs over a text, NAME.in_sum2 Float32[experts, in], and
how many tokens were summed, NAME.counts Float32[experts, 1]; a matrix that every token sees has one expert.
"""

import os
from collections.abc import Mapping

import numpy as np

from moe_jax.conversion.gguf.gguf_header import is_gguf, read_gguf_header
from moe_jax.conversion.tensors import TensorFiles
from moe_jax.core.errors import InputError, shown
from moe_jax.files.storage_path import as_path

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: str | os.PathLike[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Reads the second moments of the inputs of matrices [out, in], and of stacks of them [experts, out, in].

    Args:
      path: the file.
      shapes: of the tensors of a model, by their names in GGUF files.

    Returns:
      Float32[experts, in], by the name of the matrix, of those that the file has. An expert that no token came to has
      the mean of the others.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if it is no such file, or of another model, or its numbers are not finite.
    """
    path = as_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no imatrix file at {path}")
    if not is_gguf(path):
        raise InputError(f"{path} is no imatrix in the GGUF format; llama-imatrix writes one with --output-format gguf")
    header = read_gguf_header(path)
    if header.metadata.get("general.type") != "imatrix":
        raise InputError(f"{path} is a GGUF file of type {shown(header.metadata.get('general.type'))}, not an imatrix")
    files, found = TensorFiles(), dict[str, np.ndarray]()
    for name, entry in header.tensors.items():
        matrix = name.removesuffix(_SUMS)
        shape = shapes.get(matrix)
        if matrix == name or shape is None or len(shape) < 2:
            continue
        experts, inputs = shape[0] if len(shape) == 3 else 1, shape[-1]
        counted = header.tensors.get(matrix + _COUNTS)
        if entry.dtype != "F32" or entry.shape not in ((experts, inputs), (inputs,) * (experts == 1)):
            raise InputError(
                f"{path}: {name} is {entry.dtype} {shown(list(entry.shape))}, expected F32 {[experts, inputs]}: it was "
                "made with another model"
            )
        if counted is None or counted.dtype != "F32" or counted.shape not in ((experts, 1), (experts,)):
            raise InputError(f"{path}: {matrix}{_COUNTS} is missing, or has another shape; make the file again")
        sums = files.rows(entry, 0, experts).reshape(experts, inputs)
        counts = files.rows(counted, 0, counted.shape[0] if len(counted.shape) == 2 else 1).reshape(experts, 1)
        if not (np.isfinite(sums).all() and np.isfinite(counts).all() and (sums >= 0).all() and (counts >= 0).all()):
            raise InputError(f"{path}: {name} holds numbers that are no sums of squares; make the file again")
        used = counts[:, 0] > 0
        if used.any():
            moments = sums / np.where(counts > 0, counts, 1)
            moments[~used] = moments[used].mean(0)
            found[matrix] = moments
    if not found:
        raise InputError(f"{path} has nothing about the matrices of this model; it was made with another one")
    return found
