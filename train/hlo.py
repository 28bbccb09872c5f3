"""Collectives in the text of a compiled program: how many of each kind, and their sizes."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_BITS = {"pred": 8, "c64": 64, "c128": 128}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
# `%name = shape kind(operands), ...`; an asynchronous collective is counted where it starts.
_COLLECTIVE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) (" + "|".join(KINDS) + r")(-start)?\(([^)]*)\)(.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")


class Collectives(NamedTuple):
    """All collectives of one kind in one run of the program.

    Attributes:
      count: how often they run.
      bytes: the sum over these runs of the bytes on one device. The bytes of a collective are those of the whole array:
        the result of an all-gather, the operand of a reduce-scatter.
    """

    count: int
    bytes: int


def collectives(hlo: str) -> dict[str, Collectives]:
    """Collectives of a compiled program (`compiled.as_text()`) by kind; those in a loop count once per iteration."""
    entry, computations = computations_of(hlo)
    totals: dict[str, Collectives] = {}
    chains: set[tuple[str, str]] = set()

    def visit(name: str, times: int) -> None:
        for line in computations.get(name, []):
            if found := _COLLECTIVE.match(line):
                shape, kind, start, operands, attributes = found.groups()
                # The TPU compiler overlaps a collective with computation by spreading it over a chain of fusions,
                # each of which shows it once more.
                if chain := _CHAIN.search(attributes):
                    channel = _CHANNEL.search(attributes)
                    key = (chain[1], channel[1] if channel else "")
                    if key in chains:
                        continue
                    chains.add(key)
                # It also writes a reduce-scatter as a fusion of all-reduce and slice.
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind
                before = totals.get(kind, Collectives(0, 0))
                if found[2] == "reduce-scatter":
                    shape = operands if _SHAPE.search(operands) else _shape_of(operands, computations[name])
                size = _bytes(shape, operands, asynchronous=start is not None)
                totals[kind] = Collectives(before.count + times, before.bytes + times * size)
            for callee, trips in _calls(line, computations):
                visit(callee, times * trips)

    visit(entry, 1)
    return {kind: totals[kind] for kind in KINDS if kind in totals}


def computations_of(hlo: str) -> tuple[str, dict[str, list[str]]]:
    """Name of the entry computation, and the lines of every computation by name."""
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
    """The computations that an instruction runs, and how often it runs each."""
    if loop := _LOOP.search(line):
        yield loop[2], _trips(line, computations.get(loop[1], []))
    for callee in _CALLED.findall(line):
        yield callee, 1
    for branches in _BRANCHES.findall(line):
        for branch in branches.split(","):
            yield branch.strip().lstrip("%"), 1


def _trips(line: str, condition: list[str]) -> int:
    """Iterations of a loop: from the compiler's annotation, else the constant its counter is compared with, else 1."""
    if known := _TRIPS.search(line):
        return int(known[1])
    bounds = [int(bound) for text in condition for bound in _CONSTANT.findall(text)]
    return bounds[0] if len(bounds) == 1 else 1


def _shape_of(operands: str, computation: list[str]) -> str:
    """The shapes of operands that are written without shapes, from their definitions."""
    names = re.findall(r"%([\w.-]+)", operands)
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
