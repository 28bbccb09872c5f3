"""Collectives and large arrays in the text of a compiled program (HLO)."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moe_jax.experts.over_mesh import FURTHER_ROUNDS

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_BITS = {"pred": 8, "c64": 64, "c128": 128}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
# `%name = shape kind(operands), ...`; an asynchronous collective is counted where it starts.
_COLLECTIVE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) (" + "|".join(KINDS) + r")(-start)?\(([^)]*)\)(.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
# {{0,1},{2,3}}; or [2,4]<=[4,2]T(1,0): the numbers of an array with its axes reordered, cut into groups.
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d, ]*)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MADE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = ([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]\S* ([\w-]+)\(")
# Operations that only name arrays which exist already.
_NOT_MADE = ("parameter", "get-tuple-element", "bitcast", "constant", "tuple", "opt-barrier")
_OPERATION = re.compile(r'op_name="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"%([\w.-]+) = [su]\d+\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"^\s*ROOT .* compare\((.*?)\), direction=LT")
_ELEMENT = re.compile(r"%([\w.-]+) = \S+ get-tuple-element\(.*\), index=(\d+)")
_RESULTS = re.compile(r"^\s*ROOT .* tuple\((.*?)\)")
_ADDED = re.compile(r"%([\w.-]+) = \S+ add\((.*?)\)")
_NAMES = re.compile(r"%([\w.-]+)")


class Collectives(NamedTuple):
    """All collectives of one kind in one run of the program: how often they run, and their bytes on one device in all.

    The bytes of a collective are those of the whole array: the result of an all-gather, the operand of a
    reduce-scatter.
    """

    count: int
    bytes: int


class Transfer(NamedTuple):
    """One collective of a program: its kind, of `KINDS`, number of runs, and bytes of one run (see `Collectives`).

    `group` are numbers of devices that take part together; other groups do the same. Empty: all devices, or unknown.
    """

    kind: str
    count: int
    bytes: int
    group: tuple[int, ...]


def sums_by_kind(sent: Sequence[Transfer]) -> dict[str, Collectives]:
    """Returns the sums of collectives by kind."""
    totals: dict[str, Collectives] = {}
    for kind, count, size, _ in sent:
        before = totals.get(kind, Collectives(0, 0))
        totals[kind] = Collectives(before.count + count, before.bytes + count * size)
    return {kind: totals[kind] for kind in KINDS if kind in totals}


def transfers(hlo: str) -> list[Transfer]:
    """Returns all collectives of a compiled program (`compiled.as_text()`); those in a loop count once per iteration.

    Rounds of an exchange after the first (`experts.exchange`) are not counted: usually there are none.
    """
    entry, computations = computations_of(hlo)
    found_all: list[Transfer] = []
    chains: set[tuple[str, str]] = set()

    def visit(name: str, times: int) -> None:
        for line in computations.get(name, []):
            if found := _COLLECTIVE.match(line):
                shape, kind, start, operands, attributes = found.groups()
                # The TPU compiler overlaps a collective with computation by spreading it over a chain of fusions, each
                # of which shows it once more.
                if chain := _CHAIN.search(attributes):
                    channel = _CHANNEL.search(attributes)
                    key = (chain[1], channel[1] if channel else "")
                    if key in chains:
                        continue
                    chains.add(key)
                # It also writes a reduce-scatter as a fusion of all-reduce and slice.
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind
                given = operands
                if found[2] in ("reduce-scatter", "ragged-all-to-all") and not _SHAPE.search(operands):
                    given = _shape_of(operands, computations[name])
                shape = given if found[2] == "reduce-scatter" else shape
                size = _bytes(shape, operands, asynchronous=start is not None)
                if kind == "ragged-all-to-all":
                    # Either the operand or the result is a buffer with room for more than usually travels.
                    size = min(_size(*shape) for shape in _SHAPE.findall(given)[:2])
                found_all.append(Transfer(kind, times, size, _group(attributes)))
            for callee, trips in _calls(line, computations):
                visit(callee, times * trips)

    visit(entry, 1)
    return found_all


def largest_arrays(hlo: str, count: int = 3) -> list[str]:
    """Returns the largest arrays that operations of a program make, once per shape: size, shape, and origin.

    Arguments are not among them, nor arrays inside a fusion, which have no memory of their own.
    """
    entry, computations = computations_of(hlo)
    inside = {callee for lines in computations.values() for line in lines for callee in _CALLED.findall(line)}
    found: dict[str, tuple[int, str]] = {}
    for name, lines in computations.items():
        if name in inside and name != entry:
            continue
        for line in lines:
            if (made := _MADE.match(line)) and made[3] not in _NOT_MADE:
                shape, size = f"{made[1]}[{made[2]}]", _size(made[1], made[2])
                if size > found.get(shape, (0, ""))[0]:
                    origin = _OPERATION.search(line)
                    found[shape] = size, "/".join(origin[1].split("/")[-3:]) if origin else made[3]
    largest = sorted(found.items(), key=lambda item: -item[1][0])[:count]
    return [f"{size / 2**20:.0f} MiB {shape} of {origin}" for shape, (size, origin) in largest]


def _group(attributes: str) -> tuple[int, ...]:
    """Returns the first group of devices of a collective, or the first pair of a permutation."""
    if listed := _GROUPS.search(attributes):
        return tuple(int(number) for number in listed[1].split(",") if number.strip())
    if counted := _COUNTED_GROUPS.search(attributes):
        _, size, dims, order = counted.groups()
        numbers = np.arange(math.prod(map(int, dims.split(",")))).reshape([int(dim) for dim in dims.split(",")])
        if order:
            numbers = numbers.transpose([int(axis) for axis in order.split(",")])
        return tuple(numbers.reshape(-1)[: int(size)].tolist())
    return ()


def computations_of(hlo: str) -> tuple[str, dict[str, list[str]]]:
    """Returns the name of the entry computation, and the lines of every computation by name."""
    entry = name = ""
    lines: dict[str, list[str]] = {}
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            name = opened[2]
            lines[name] = []
            entry = name if opened[1] else entry
        elif name:
            lines[name].append(line)
    return entry, lines


def _calls(line: str, computations: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
    """Yields the computations that an instruction runs, and how often it runs each."""
    if (loop := _LOOP.search(line)) and FURTHER_ROUNDS not in line:
        yield loop[2], _trips(line, computations.get(loop[1], []), computations.get(loop[2], []))
    for callee in _CALLED.findall(line):
        yield callee, 1
    for branches in _BRANCHES.findall(line):
        for branch in branches.split(","):
            yield branch.strip().lstrip("%"), 1


def _trips(line: str, condition: list[str], body: list[str]) -> int:
    """Returns a loop's iterations: from the compiler's annotation, else from its counter, which begins at 0; else 1."""
    if known := _TRIPS.search(line):
        return int(known[1])
    compared = next((_NAMES.findall(found[1]) for text in condition if (found := _COMPARED.match(text))), [])
    bounds = {name: int(value) for text in condition for name, value in _CONSTANT.findall(text)}
    if len(bounds) != 1:
        bounds = {name: bound for name, bound in bounds.items() if name in compared}
    elements = dict(element for text in condition for element in _ELEMENT.findall(text))
    counter = next((int(elements[name]) for name in compared if name in elements), None)
    return -(-next(iter(bounds.values())) // _step(counter, body)) if len(bounds) == 1 else 1


def _step(counter: int | None, body: list[str]) -> int:
    """Returns the increment of a loop's counter, the element of its state with this number, in an iteration.

    A ring of the TPU compiler is unrolled twice, and counts by two.
    """
    results = next((_NAMES.findall(found[1]) for text in body if (found := _RESULTS.match(text))), [])
    if counter is None or counter >= len(results):
        return 1
    added = dict(found for text in body for found in _ADDED.findall(text))
    constants = dict(found for text in body for found in _CONSTANT.findall(text))
    steps = [int(constants[name]) for name in _NAMES.findall(added.get(results[counter], "")) if name in constants]
    return steps[0] if len(steps) == 1 and steps[0] > 0 else 1


def _shape_of(operands: str, computation: list[str]) -> str:
    """Returns the shapes of operands that are written without shapes, from their definitions."""
    names = _NAMES.findall(operands)
    definitions = [re.compile(rf"\s*(?:ROOT )?%{re.escape(name)} = (.*?) [\w-]+\(") for name in names]
    defined = (definition.match(line) for definition in definitions for line in computation)
    return " ".join(found[1] for found in defined if found)


def _bytes(shape: str, operands: str, *, asynchronous: bool) -> int:
    sizes = [_size(kind, dims) for kind, dims in _SHAPE.findall(shape)]
    if asynchronous and len(sizes) > 1:
        # The tuple of a `-start` holds the operands, then the results, then data for the hardware.
        count = max(1, operands.count("%"))
        return sum(sizes[count : 2 * count])
    return sum(sizes)


def _size(kind: str, dims: str) -> int:
    number = re.search(r"\d+", kind)
    bits = _BITS.get(kind) or (int(number[0]) if number else 0)
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8
