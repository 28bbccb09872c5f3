"""Prints the mapping of a checkpoint as a table with one line for all tensors of a kind."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from moe_jax.conversion.table import Piece
from moe_jax.core.formatting import GB


class _Line(NamedTuple):
    """The line for all tensors of one kind."""

    tensor: str
    tensor_shape: tuple[int, ...]
    operations: str
    leaf: str
    leaf_shape: tuple[int, ...]
    dtypes: str


def print_mapping(
    pieces: Mapping[str, Iterable[Piece]],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    leaves: Mapping[str, Any],
    stored: Mapping[str, Any],
    console: Console,
) -> None:
    """Prints which tensors and leaves correspond, by which operations, and their sizes.

    Args:
      pieces: leaf path -> its pieces.
      tensor_shapes: by name of tensor.
      leaves: leaf path -> shape and dtype, as they are written.
      stored: leaf path -> dtype as it is read.
      console: where to print.
    """
    counts: dict[_Line, tuple[set[str], set[str]]] = {}
    for leaf, parts in pieces.items():
        for piece in parts:
            line = _Line(
                piece.template,
                tensor_shapes[piece.tensor],
                _operations(piece, tensor_shapes[piece.tensor]),
                re.sub(r"^layers/\d+/", "layers/{i}/", leaf),
                tuple(leaves[leaf].shape),
                _dtypes(stored[leaf].dtype, leaves[leaf].dtype),
            )
            tensors, paths = counts.setdefault(line, (set(), set()))
            tensors.add(piece.tensor)
            paths.add(leaf)
    table = Table(box=None, pad_edge=False)
    for title in ("tensors", "", "shape", "operations", "leaves", "", "shape", "dtype", "GB"):
        is_name = title in ("tensors", "leaves")
        table.add_column(title, overflow="fold", no_wrap=not is_name, justify="right" if title == "GB" else "left")
    for line, (tensors, paths) in counts.items():
        size = sum(_nbytes(leaves[path]) for path in paths)
        table.add_row(
            line.tensor, f"x{len(tensors)}", _shape(line.tensor_shape), line.operations,
            line.leaf, f"x{len(paths)}", _shape(line.leaf_shape), line.dtypes, f"{size / GB:.3f}",
        )  # fmt: skip
    console.print(table)
    total = sum(_nbytes(leaf) for leaf in leaves.values())
    parameters = sum(map(math.prod, tensor_shapes.values()))
    console.print(f"{len(tensor_shapes)} tensors, {len(leaves)} leaves, {parameters:,} parameters, {total / GB:.3f} GB")


def _operations(piece: Piece, tensor_shape: tuple[int, ...]) -> str:
    names = ["transpose"] if piece.transpose else []
    is_joined = tensor_shape[-len(piece.shape) :] != piece.shape
    if piece.expert is not None and len(tensor_shape) == len(piece.shape):
        names.append("stack")
    if is_joined:
        names.append("split")
    return ", ".join(names) or "rename"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _dtypes(before: Any, after: Any) -> str:
    return str(before) if before == after else f"{before} -> {after}"


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
