"""The importance of inputs, in a file of llama.cpp's `llama-imatrix` (an "importance matrix").

For every matrix a GGUF file has the sum of the squares of each of its inputs over a text, NAME.in_sum2
Float32[experts, in], and how many tokens were summed, NAME.counts Float32[experts, 1]; a matrix that every token sees
has one expert. Older files have another form, of which `imatrix_dat` knows.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from moe_jax.conversion.gguf.gguf_file import GGUFFile, header_of
from moe_jax.conversion.gguf.gguf_header import is_gguf, read_gguf_header
from moe_jax.conversion.gguf.gguf_types import Planned
from moe_jax.conversion.gguf.imatrix_dat import MADE_WITH_ANOTHER, experts_and_inputs, read_dat
from moe_jax.conversion.tensors import TensorFiles
from moe_jax.core.errors import InputError, shown
from moe_jax.files.file_work import FileWorkplace
from moe_jax.files.staging import check_target, require_space
from moe_jax.files.storage_path import as_path

_SUMS, _COUNTS = ".in_sum2", ".counts"
_KIND = "imatrix"
_MOST = 2**32 - 1  # of the numbers of chunks and of their tokens


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
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    found = _read_gguf(path, matrices) if is_gguf(path) else read_dat(path, matrices)
    if not found:
        raise InputError(f"{path} has nothing about the matrices of this model; it was made with another one")
    return found


def _read_gguf(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    header = read_gguf_header(path)
    if header.metadata.get("general.type") != _KIND:
        raise InputError(f"{path} is a GGUF file of type {shown(header.metadata.get('general.type'))}, not an imatrix")
    files, found = TensorFiles(), dict[str, np.ndarray]()
    for name, entry in header.tensors.items():
        matrix = name.removesuffix(_SUMS)
        if matrix == name or matrix not in shapes:
            continue
        experts, inputs = experts_and_inputs(shapes[matrix])
        counted = header.tensors.get(matrix + _COUNTS)
        if entry.dtype != "F32" or entry.shape not in ((experts, inputs), (inputs,) * (experts == 1)):
            raise InputError(
                f"{path}: {name} is {entry.dtype} {shown(list(entry.shape))}, expected F32 {[experts, inputs]}: "
                f"{MADE_WITH_ANOTHER}"
            )
        if counted is None or counted.dtype != "F32" or counted.shape not in ((experts, 1), (experts,)):
            raise InputError(f"{path}: {matrix}{_COUNTS} is missing, or has another shape; make the file again")
        sums = files.rows(entry, 0, experts).reshape(experts, inputs)
        counts = files.rows(counted, 0, counted.shape[0] if len(counted.shape) == 2 else 1).reshape(experts, 1)
        if not (_are_sums(sums) and _are_sums(counts)):
            raise InputError(f"{path}: {name} holds numbers that are no sums of squares; make the file again")
        used = counts[:, 0] > 0
        if used.any():
            moments = sums / np.where(counts > 0, counts, 1)
            moments[~used] = moments[used].mean(0)
            found[matrix] = moments
    return found


def write_imatrix(
    path: str | os.PathLike[str],
    squares: Mapping[str, Float[np.ndarray, "experts in"]],
    counts: Mapping[str, Float[np.ndarray, " experts"]],
    *,
    datasets: Sequence[str],
    chunk_count: int,
    chunk_size: int,
) -> None:
    """Writes a file that `read_imatrix` and llama-quantize read.

    Args:
      path: of the file, which must not be there.
      squares: sums of the squares of inputs, by the name of the matrix in GGUF files; of a single matrix [1, in].
      counts: for each of them, how many tokens came to every expert.
      datasets: names of the texts, at least one, which llama-quantize notes in its files.
      chunk_count: number of pieces of text that were seen.
      chunk_size: tokens of a piece.

    Raises:
      InputError: if something is at `path`, sums and counts are not those of the same matrices, or are not finite
        or negative, or a number of chunks is out of range.
      OSError: if the disk is full. Nothing is at `path` then.
    """
    path = as_path(path)
    check_target(path, file=True)
    if not squares or squares.keys() != counts.keys():
        raise InputError(f"{path} would hold no sums, or sums without counts; give both of the same matrices")
    if not datasets:
        raise InputError(f"{path} needs the name of a text, without which llama-quantize reads no imatrix")
    for name, number in (("chunk_count", chunk_count), ("chunk_size", chunk_size)):
        if not 0 < number <= _MOST:
            raise InputError(f"{name}={number} must lie between 1 and {_MOST}")
    tensors: dict[str, np.ndarray] = {}
    for name in sorted(squares):
        sums, counted = squares[name], counts[name]
        if sums.ndim != 2 or counted.shape != sums.shape[:1] or not sums.size:
            raise InputError(f"{name} has sums {list(sums.shape)} and counts {list(counted.shape)}, expected "
                             "[experts, inputs] and [experts]")  # fmt: skip
        tensors |= {name + _SUMS: sums, name + _COUNTS: counted[:, None]}
    with np.errstate(over="ignore"):  # said in our own words
        stored = {name: np.asarray(values, np.float32) for name, values in tensors.items()}
    for name, values in stored.items():
        if not _are_sums(values):
            raise InputError(f"{name} holds numbers that are not finite, or negative; they are sums of squares")
    metadata = {
        "general.type": _KIND,
        "imatrix.datasets": list(datasets),
        "imatrix.chunk_count": chunk_count,
        "imatrix.chunk_size": chunk_size,
    }
    planned = {name: Planned("F32", values.shape) for name, values in stored.items()}
    header = header_of(_KIND, metadata, planned)
    require_space(path, len(header) + sum(one.nbytes for one in planned.values()))
    with FileWorkplace(path) as work:
        with GGUFFile(work.file, header, planned) as file:
            for name, values in stored.items():
                file.write(name, 0, values)
        work.complete()


def _are_sums(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all() and (values >= 0).all())
