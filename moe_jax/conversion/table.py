"""The mapping tables of families, their application to a model, and their print.

A table is a tuple of rows. A row maps a tensor of the Hugging Face checkpoint to the leaf, or leaves, that it holds:

    Row("model.layers.{i}.self_attn.q_proj.weight", "layers/{i}/attention/q/kernel", transpose=True)

`{i}` runs over layers and `{e}` over experts, or over heads that have norms of their own. There are eight operations,
and each works in both directions:

- rename: always;
- transpose: the tensor is [out, in], the leaf [in, out];
- stack: a row whose tensor has `{e}` is one expert of a leaf [E, ...]; without `{e}` the tensor has the E axis too;
- join: a row with several leaves is a fused tensor, the leaves joined along the rows of the tensor;
- interleave: or their columns take turns in it, or stand side by side;
- groups: or a group of columns of each, such as those of a head, before the next group;
- reshape: a row with a `shape` has a tensor of other axes;
- heads: a row with `heads` has a stack of some columns of every head, and the leaf is put together from several rows.

A row applies if the model has its leaves. So one table serves models with and without biases, tied heads, q/k norms,
dense and MoE layers. There is one further condition: that the model has, or does not have, some other leaf.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import rich.table
from rich.console import Console

from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.core.formatting import count_bytes, show_bytes

PER_EXPERT = "per-expert"
FUSED = "fused"
LAYOUTS = (PER_EXPERT, FUSED)


class Heads(NamedTuple):
    """Columns of a leaf [rows, count * width] that a tensor has as a stack, a matrix for each head.

    Attributes:
      count: number of heads.
      width: columns of a head in the leaf.
      start: the first of them that the tensor has.
      stop: the one after the last.
    """

    count: int
    width: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor of a checkpoint and the leaves that it holds.

    Attributes:
      tensor: its name, with `{i}` for the layer, counted within its stack, and `{e}` for the expert or head.
      leaves: leaf path or paths, with `{i}`; several are joined along the tensor's rows, or `interleaved`.
      transpose: the last two axes are swapped.
      layout: the expert layout (`LAYOUTS`) this row belongs to; None: both.
      stack: in models with several stacks, the one whose layers `{i}` counts: a decoder's leaves follow the encoder's,
        and those of the image encoder of a model that sees are below `vision/tower`.
      beside: the row applies to models that also have this leaf, with `{i}`.
      without: the row applies to models that do not have this leaf.
      shape: of a tensor that has other axes than what fills it, with as many entries in the same order, such as the
        kernel of a convolution; None: it has the same.
      heads: the columns that the tensor has of every head of its one leaf; None: it has the whole leaf.
      interleaved: the leaves take turns along the tensor's last axis: the first column of each, then the second ones.
      side_by_side: the leaves, which are equally wide, are joined along the tensor's last axis.
      groups: number of groups of rows of the tensor, each of which has an equal part of every leaf, one leaf after the
        other: the columns that belong to a head, or to some heads. A `Family` says it of its tensors.
    """

    tensor: str
    leaves: str | tuple[str, ...]
    transpose: bool = False
    layout: str | None = None
    stack: Literal["encoder", "decoder", "tower"] | None = None
    beside: str | None = None
    without: str | None = None
    shape: tuple[int, ...] | None = None
    heads: Heads | None = None
    interleaved: bool = False
    side_by_side: bool = False
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Tensors that need not be converted: a regular expression for the whole name, and the reason."""

    pattern: str
    why: str


@dataclasses.dataclass(frozen=True)
class Tied:
    """A tensor that may be stored although the model ties it to another one; both must then be equal."""

    tensor: str
    equals: str
    otherwise: ClassVar[str] = "set tie_word_embeddings to false if they are meant to"


@dataclasses.dataclass(frozen=True)
class Copied(Tied):
    """A copy of a tensor, beside layers that predict tokens after the next."""

    otherwise: ClassVar[str] = "leave the further layers out (--further leave)"


Entry = Row | Ignored | Tied
Table = tuple[Entry, ...]


def linear(tensor: str, leaf: str, layout: str | None = None) -> tuple[Row, ...]:
    """Returns the rows of a linear map: `weight` is the transposed `kernel`; `bias`, if there is one."""
    return (
        Row(f"{tensor}.weight", f"{leaf}/kernel", transpose=True, layout=layout),
        Row(f"{tensor}.bias", f"{leaf}/bias", layout=layout),
    )


def norm(tensor: str, leaf: str) -> tuple[Row, ...]:
    """Returns the rows of a norm: `weight` is `scale`; `bias`, if there is one."""
    return (Row(f"{tensor}.weight", f"{leaf}/scale"), Row(f"{tensor}.bias", f"{leaf}/bias"))


def joined_qkv(tensor: str, layout: str | None = None) -> tuple[Row, ...]:
    """Returns the rows of a linear map whose outputs are queries, keys and values."""
    kernels, biases = (tuple(f"layers/{{i}}/attention/{one}/{part}" for one in "qkv") for part in ("kernel", "bias"))
    return (
        Row(f"{tensor}.weight", kernels, transpose=True, layout=layout),
        Row(f"{tensor}.bias", biases, layout=layout),
    )


class Piece(NamedTuple):
    """A run of elements in a tensor that fills one leaf, one expert of a leaf, or some columns of a leaf."""

    tensor: str  # name of the tensor
    offset: int  # number of elements of the tensor before the piece
    shape: tuple[int, ...]  # of the piece in the tensor
    leaf: str  # path of the leaf
    expert: int | None  # index on the leaf's first axis, of an expert or a head; None: the piece is the whole leaf
    transpose: bool  # the leaf holds the piece transposed
    template: str  # the tensor of its row, with `{i}` and `{e}`
    columns: tuple[int, int] | None = None  # of the leaf that it fills, the first and the one after the last; None: all
    turns: tuple[str, ...] = ()  # leaves whose columns take turns in the tensor from the offset on; none: they do not
    in_blocks: bool = False  # a turn is all columns of a leaf, and not one


class Mapped(NamedTuple):
    """A table applied to a model: shapes of the tensors, and the pieces that fill each leaf."""

    tensors: dict[str, tuple[int, ...]]
    pieces: dict[str, list[Piece]]


def apply_table(
    table: Table,
    leaves: Mapping[str, Any],
    num_layers: int,
    layout: str,
    family: str,
    *,
    num_encoder_layers: int,
    num_tower_layers: int = 0,
) -> Mapped:
    """Determines the tensors of a model, and the pieces of its leaves, each covered exactly once.

    The `leaves` have a `shape`; `num_layers` are those of the encoder and the decoder, `num_tower_layers` those of what
    the model sees with; `family` is for messages. Raises `InputError` if the table has no row for a leaf.
    """
    mapped = Mapped({}, {})
    rows = [row for row in table if isinstance(row, Row) and row.layout in (None, layout)]
    per_layer = [row for row in rows if "{i}" in row.tensor]
    first = rows.index(per_layer[0]) if per_layer else len(rows)
    # Layer by layer, so that a checkpoint is read and written front to back.
    steps: list[tuple[Row, int | None]] = [(row, None) for row in rows[:first]]
    for i in range(num_layers):
        stack = "encoder" if i < num_encoder_layers else "decoder"
        steps += [(row, i) for row in per_layer if row.stack in (None, stack)]
    steps += [(row, None) for row in rows[first:] if row not in per_layer]
    steps += [(row, i) for i in range(num_tower_layers) for row in per_layer if row.stack == "tower"]
    for row, i in steps:
        _apply_row(row, i, num_encoder_layers if row.stack == "decoder" else 0, leaves, mapped)
    homeless = [f"it has no tensor for {path} {tuple(spec.shape)}" for path, spec in leaves.items()
                if path not in mapped.pieces]  # fmt: skip
    raise_if_any(homeless, f"the format of {family!r} cannot hold this model")
    return mapped


def _apply_row(row: Row, i: int | None, before: int, leaves: Mapping[str, Any], mapped: Mapped) -> None:
    """Adds the mapping of layer `i` by a row; `before` layers of other stacks do not count in names of tensors."""
    templates = (row.leaves,) if isinstance(row.leaves, str) else row.leaves
    paths = [template.replace("{i}", str(i)) for template in templates]
    if not all(path in leaves for path in paths):
        return
    if row.beside is not None and row.beside.replace("{i}", str(i)) not in leaves:
        return
    if row.without is not None and row.without.replace("{i}", str(i)) in leaves:
        return
    if row.heads is not None:
        _apply_heads(row, row.heads, paths[0], i, leaves, mapped)
        return
    if row.groups > 1:
        _apply_groups(row, paths, i, leaves, mapped)
        return
    shapes = [tuple(leaves[path].shape) for path in paths]
    is_stacked = "/experts/" in paths[0] or "{e}" in row.tensor
    experts: Iterable[int | None] = range(shapes[0][0]) if is_stacked else (None,)
    for e in experts:
        in_stack = None if i is None else i - before
        name = row.tensor.replace("{i}", str(in_stack)).replace("{e}", str(e))
        if name not in mapped.tensors:
            shape = _tensor_shape(row, shapes, stacked=e is not None)
            assert row.shape is None or math.prod(row.shape) == math.prod(shape), (row, shape)
            mapped.tensors[name] = shape if row.shape is None else row.shape
        offset = 0 if e is None or "{e}" in row.tensor else e * math.prod(mapped.tensors[name][1:])
        turns = tuple(paths) if row.interleaved or row.side_by_side else ()
        for path, shape in zip(paths, shapes, strict=True):
            piece_shape = _piece_shape(shape if e is None else shape[1:], row.transpose)
            piece = Piece(
                name, offset, piece_shape, path, e, row.transpose, row.tensor, turns=turns, in_blocks=row.side_by_side
            )
            mapped.pieces.setdefault(path, []).append(piece)
            offset += 0 if turns else math.prod(piece_shape)


def _apply_heads(row: Row, heads: Heads, path: str, i: int | None, leaves: Mapping[str, Any], mapped: Mapped) -> None:
    """Adds the mapping of layer `i` by a row that has some columns of every head of its leaf."""
    rows, columns = leaves[path].shape
    assert columns == heads.count * heads.width, (row, columns)
    name = row.tensor.replace("{i}", str(i))
    shape = _piece_shape((rows, heads.stop - heads.start), row.transpose)
    mapped.tensors[name] = (heads.count, *shape)
    for head in range(heads.count):
        first = head * heads.width
        filled = (first + heads.start, first + heads.stop)
        piece = Piece(name, head * math.prod(shape), shape, path, None, row.transpose, row.tensor, filled)
        mapped.pieces.setdefault(path, []).append(piece)


def _apply_groups(row: Row, paths: list[str], i: int | None, leaves: Mapping[str, Any], mapped: Mapped) -> None:
    """Adds the mapping of layer `i` by a row whose groups each have some columns of every leaf."""
    name, offset = row.tensor.replace("{i}", str(i)), 0
    shapes = [tuple(leaves[path].shape) for path in paths]
    assert row.transpose or len(shapes[0]) == 1, row
    mapped.tensors[name] = _tensor_shape(row, shapes, stacked=False)
    for group in range(row.groups):
        for path, (*lead, width) in zip(paths, shapes, strict=True):
            assert width % row.groups == 0, (row, width)
            part = width // row.groups
            shape = _piece_shape((*lead, part), row.transpose)
            filled = (group * part, (group + 1) * part)
            piece = Piece(name, offset, shape, path, None, row.transpose, row.tensor, filled)
            mapped.pieces.setdefault(path, []).append(piece)
            offset += math.prod(shape)


def _piece_shape(shape: tuple[int, ...], transpose: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if transpose else shape


def _tensor_shape(row: Row, shapes: list[tuple[int, ...]], *, stacked: bool) -> tuple[int, ...]:
    """Returns the shape of the tensor of a row, all experts included unless it has one tensor per expert."""
    pieces = [_piece_shape(shape[1:] if stacked else shape, row.transpose) for shape in shapes]
    if row.interleaved or row.side_by_side:
        joined = (*pieces[0][:-1], sum(piece[-1] for piece in pieces))
    else:
        joined = (sum(piece[0] for piece in pieces), *pieces[0][1:])
    return (shapes[0][0], *joined) if stacked and "{e}" not in row.tensor else joined


def detect_layout(table: Table, names: Iterable[str]) -> str:
    """Returns the expert layout that names of tensors show, per-expert if none; raises `InputError` for both."""
    found = {layout: _first_match(table, names, layout) for layout in LAYOUTS}
    if all(found.values()):
        examples = " and ".join(f"{shown(name)} ({layout})" for layout, name in found.items())
        raise InputError(f"the checkpoint mixes two layouts of experts, {examples}; keep one of them")
    return FUSED if found[FUSED] else PER_EXPERT


def _first_match(table: Table, names: Iterable[str], layout: str) -> str | None:
    """Returns the first name that only rows of `layout` match."""
    templates = [re.escape(row.tensor) for row in table if isinstance(row, Row) and row.layout == layout]
    if not templates:
        return None
    pattern = re.compile("|".join(templates).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+"))
    return next((name for name in names if pattern.fullmatch(name)), None)


def print_mapping(
    mapped: Mapped,
    leaves: Mapping[str, Any],
    stored: Mapping[str, Any],
    console: Console,
    *,
    codes: Mapping[str, str] = {},
) -> None:
    """Prints which tensors and leaves correspond, by which operations, and their sizes; a line for all of a kind.

    The `leaves` have shapes and dtypes as they are written, `stored` the dtypes as they are read; `codes` has a word
    for those of every tensor that is stored in codes.
    """
    tensor_shapes, pieces = mapped
    counts: dict[tuple[str, ...], tuple[set[str], set[str]]] = {}
    for leaf, parts in pieces.items():
        after = str(leaves[leaf].dtype)
        for piece in parts:
            before = codes.get(piece.tensor, str(stored[leaf].dtype))
            line = (
                piece.template,
                "x".join(map(str, tensor_shapes[piece.tensor])),
                _operations(piece, tensor_shapes[piece.tensor]),
                re.sub(r"^(vision/tower/|)layers/\d+/", r"\1layers/{i}/", leaf),
                "x".join(map(str, leaves[leaf].shape)),
                before if before == after else f"{before} -> {after}",
            )
            tensors, paths = counts.setdefault(line, (set(), set()))
            tensors.add(piece.tensor)
            paths.add(leaf)
    table = rich.table.Table(box=None, pad_edge=False)
    for title in ("tensors", "", "shape", "operations", "leaves", "", "shape", "dtype", "bytes"):
        is_name = title in ("tensors", "leaves")
        table.add_column(title, overflow="fold", no_wrap=not is_name, justify="right" if title == "bytes" else "left")
    for (tensor, shape, operations, leaf, leaf_shape, dtypes), (tensors, paths) in counts.items():
        size = show_bytes(count_bytes(leaves[path] for path in paths))
        count, leaf_count = f"x{len(tensors)}", f"x{len(paths)}"
        table.add_row(tensor, count, shape, operations, leaf, leaf_count, leaf_shape, dtypes, size)
    console.print(table)
    total = show_bytes(count_bytes(leaves.values()))
    parameters = sum(map(math.prod, tensor_shapes.values()))
    console.print(f"{len(tensor_shapes)} tensors, {len(leaves)} leaves, {parameters:,} parameters, {total}")


def _operations(piece: Piece, tensor_shape: tuple[int, ...]) -> str:
    names = ["transpose"] if piece.transpose else []
    if piece.columns is not None:
        return ", ".join([*names, "heads" if math.prod(tensor_shape[1:]) == math.prod(piece.shape) else "groups"])
    if math.prod(tensor_shape) == math.prod(piece.shape) and tensor_shape != piece.shape:
        return ", ".join([*names, "reshape"])
    if piece.expert is not None and len(tensor_shape) == len(piece.shape):
        names.append("stack")
    if piece.turns:
        names.append("split" if piece.in_blocks else "interleave")
    elif tensor_shape[-len(piece.shape) :] != piece.shape:
        names.append("split")
    return ", ".join(names) or "rename"
