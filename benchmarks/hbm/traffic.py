"""Bytes that a program moves through the memory of its device, from the text that the compiler leaves of it.

Counted are the operands and results of the instructions that the compiler did not fuse into others:

- what lies in fast memory (`S(1)` in its layout) is not counted, a copy from there or to there on its own side;
- a gather or slice reads as much as it writes, and not all of what it takes it from; of an array of which a part is
  written nothing else moves;
- a loop moves what one turn does, times the number of turns; but each turn of one that calls kernels takes other rows:
  what it carries from turn to turn is read by a kernel once in all turns, and written once;
- a Pallas kernel for TPU moves what its blocks say (`cost_estimate`): the base once, what is stored of every expert
  once, rows once for every panel of the kernels, results once. Other kernels, and XLA's own products, read every
  operand once, which is the least that they can do: how often they come back for it, and what a GPU's cache catches of
  that, is not seen.
"""

import math
import re
from typing import NamedTuple

from moe_jax.planning.hlo import computations_of

_BITS = {"pred": 8}
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_NAME = r"%([\w.-]+)"
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
_SCOPED = re.compile(r'"scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')
_LOOP = re.compile(r"\bbody=%?([\w.-]+)")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
# These move nothing: they name what is there, or end what was counted at its start.
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "iota", "copy-done", "async-done",
    "async-update", "partition-id", "opt-barrier",
}  # fmt: skip
# These read as much as they write.
_PARTIAL = {"gather", "dynamic-slice", "slice"}


class Traffic(NamedTuple):
    """Attributes:
    moved: bytes of all instructions.
    kernels: of those that Pallas kernels for TPU move.
    fast: bytes of fast memory that the largest of these kernels asks for.
    """

    moved: int
    kernels: int
    fast: int


def traffic(hlo: str) -> Traffic:
    """Counts a compiled program.

    Raises:
      ValueError: if it branches, or loops a number of times that the compiler does not know.
    """
    entry, computations = computations_of(hlo)
    total = Traffic(0, 0, 0)

    def visit(name: str, times: int) -> None:
        nonlocal total
        shapes: dict[str, str] = {}
        carried: set[str] = set()
        for line in computations[name]:
            found = _INSTRUCTION.match(line)
            if found is None:
                continue
            label, shape, kind, rest = found.groups()
            shapes[label] = shape
            if kind == "get-tuple-element" or (kind == "bitcast" and carried.issuperset(re.findall(_NAME, rest))):
                carried.add(label)
            body, turns = _LOOP.search(rest), _TURNS.search(rest)
            if kind == "while" and body and turns:
                visit(body[1], times * int(turns[1]))
                continue
            if kind in ("while", "conditional"):
                raise ValueError(f"{label}: what a {kind} moves is not known")
            called = _CALLED.search(rest)
            if kind == "call" and called:
                visit(called[1], times)
            elif kind not in _FREE:
                names = re.findall(_NAME, rest.partition("), ")[0])
                operands = [shapes.get(operand, "") for operand in names]
                inside = computations.get(called[1], []) if called else []
                if kind == "custom-call" and times > 1:
                    made = [shapes.get(operand, "") for operand in names if operand not in carried]
                    kept = [shapes.get(operand, "") for operand in names if operand in carried]
                    kept = [operand for operand in kept if _parts(operand) != _parts(shape)]
                    moved = times * sum(map(_bytes, made)) + sum(map(_bytes, (*kept, shape)))
                else:
                    moved = times * _moved(kind, shape, operands, line, inside)
                of_kernel = _ESTIMATE.search(line) is not None
                scoped = _SCOPED.search(line)
                total = Traffic(
                    total.moved + moved,
                    total.kernels + (moved if of_kernel else 0),
                    max(total.fast, int(scoped[1]) if of_kernel and scoped else 0),
                )

    visit(entry, 1)
    return total


def _moved(kind: str, shape: str, operands: list[str], line: str, inside: list[str]) -> int:
    if estimate := _ESTIMATE.search(line):
        return int(estimate[1])
    if kind in ("copy-start", "async-start"):
        # The result holds the operand, the destination and a counter.
        parts = _parts(shape)
        destination = parts[0] if kind == "copy-start" else parts[1]
        source_is_slow = any(_bytes(operand) for operand in operands)
        return _bytes(destination) + (_bytes(destination, everywhere=True) if source_is_slow else 0)
    result = _bytes(shape)
    if kind in _PARTIAL:
        return result + _bytes(shape, everywhere=True) + sum(map(_bytes, operands[1:]))
    read, array = 0, None
    if update := _update(shape, [line], operands) or _update(shape, inside):
        written, array = update
        result = written if result else 0
    for number, operand in enumerate(operands):
        if number == array:
            continue
        taken = _taken(number, inside)
        read += _bytes(operand) if taken is None else min(taken, _bytes(operand) and taken)
    return result + read


def _update(shape: str, lines: list[str], operands: list[str] | None = None) -> tuple[int, int | None] | None:
    """Bytes that are written into a part of an array of that shape, and which operand the array is, in place.

    None: nothing is. The array is no operand where all its parts are written so.

    Args:
      shape: of the result.
      lines: the instruction, or those of a fusion.
      operands: shapes of those of the instruction; None: they are in the lines.
    """
    shapes, numbers, written, array = dict[str, str](), dict[str, int](), 0, None
    for line in lines:
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        label, made, kind, rest = found.groups()
        shapes[label], used = made, re.findall(_NAME, rest.partition(")")[0])
        if kind == "parameter":
            numbers[label] = int(rest.partition(")")[0])
        elif kind == "bitcast" and used and used[0] in numbers:
            numbers[label] = numbers[used[0]]
        elif kind == "dynamic-update-slice" and _sizes(made) == _sizes(shape):
            part = operands[1] if operands is not None else shapes[used[1]]
            written += _bytes(part, everywhere=True)
            array = 0 if operands is not None else numbers.get(used[0], array)
    return (written, array) if written else None


def _sizes(shape: str) -> list[tuple[str, str]]:
    """Types and sizes of all arrays in a shape, wherever they lie."""
    return [(dtype, sizes) for dtype, sizes, _ in _SHAPE.findall(shape)]


def _taken(number: int, inside: list[str]) -> int | None:
    """Bytes of a fusion's operand that are read by what takes parts of it alone; None: all of it is read."""
    names, total = set[str](), 0
    for line in inside:
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        label, shape, kind, rest = found.groups()
        used = re.findall(_NAME, rest.partition(")")[0])
        if kind == "parameter" and rest.startswith(f"{number})"):
            names.add(label)
        elif names.intersection(used):
            if kind == "bitcast":
                names.add(label)
            elif kind in _PARTIAL and used[0] in names and not names.intersection(used[1:]):
                total += _bytes(shape, everywhere=True)
            else:
                return None
    return total if names else None


def _parts(shape: str) -> list[str]:
    """The arrays of a tuple, one by one."""
    return [found[0] for found in re.finditer(_SHAPE, shape)]


def _bytes(shape: str, *, everywhere: bool = False) -> int:
    """Of all arrays in a shape, or of those alone that do not lie in fast memory."""
    total = 0
    for dtype, sizes, layout in _SHAPE.findall(shape):
        if "S(" in layout and not everywhere:
            continue
        bits = _BITS.get(dtype) or int(re.sub(r"^[a-z]+", "", dtype).partition("e")[0] or 0)
        total += math.ceil(bits * math.prod(int(size) for size in sizes.split(",") if size) / 8)
    return total
