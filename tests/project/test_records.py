"""How dataclasses are declared: nothing of them changes, and what has many fields is made by their names."""

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from tests.support.environment import ROOT

# They hold what goes on beside them, or what they compute of their fields.
CHANGING = {"Job", "_GradientPass"}
# Their first fields are a thing and its parts, in the order in which people write them.
IN_ORDER = {
    *("BankConfig", "FormTiles", "Job", "LeastOutputError", "Loading", "Matrix", "MemoryItem", "NF4Tile", "PackedTile"),
    *("Place", "Row", "WithLoRA"),
}
MOST_IN_ORDER = 2


class Record(NamedTuple):
    """A dataclass as a module declares it: names of its fields and bases, and what its decorator says."""

    module: str
    name: str
    fields: tuple[str, ...]
    bases: tuple[str, ...]
    frozen: bool
    kw_only: bool


def records_of(module: str, source: str) -> Iterator[Record]:
    """Yields the dataclasses of a module's text."""
    for node in ast.walk(ast.parse(source)):
        for decorator in getattr(node, "decorator_list", ()):
            call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
            if not isinstance(node, ast.ClassDef) or ast.unparse(call.func).split(".")[-1] != "dataclass":
                continue
            said = {word.arg for word in call.keywords if ast.unparse(word.value) == "True"}
            fields = [
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                if "ClassVar" not in ast.unparse(part.annotation)
            ]
            bases = tuple(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
            yield Record(module, node.name, tuple(fields), bases, "frozen" in said, "kw_only" in said)


def by_name(records: list[Record]) -> Mapping[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.name, []).append(record)
    return found


def wrongly_declared(records: list[Record]) -> Iterator[str]:
    """Yields a line for each dataclass that may change, or whose many fields may be given by their order."""
    named = by_name(records)
    for record in records:
        where = f"{record.module}: {record.name}"
        if not record.frozen and record.name not in CHANGING:
            yield f"{where} is not frozen"
        if record.kw_only or record.name in IN_ORDER:
            continue
        if len(record.fields) > MOST_IN_ORDER:
            yield f"{where} has {len(record.fields)} fields and not kw_only"
        if any(base.kw_only for name in record.bases for base in named.get(name, ())):
            yield f"{where} extends what is made by keyword, and is not"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    files = sorted((ROOT / "moe_jax").rglob("*.py"))
    return [record for file in files for record in records_of(str(file.relative_to(ROOT)), file.read_text("utf-8"))]


def test_dataclasses_are_frozen_and_made_by_keyword(records):
    assert not list(wrongly_declared(records))


def test_exceptions_are_still_needed(records):
    named = by_name(records)
    assert all(not record.frozen for name in CHANGING for record in named[name])
    assert all(not record.kw_only for name in IN_ORDER for record in named[name])


@pytest.mark.parametrize(
    "source, problems",
    [
        ("@dataclass\nclass A:\n    x: int\n", 1),
        ("@dataclasses.dataclass(frozen=False)\nclass A:\n    x: int\n", 1),
        ("@dataclass(frozen=True)\nclass A:\n    x: int\n    y: ClassVar[int]\n    z: int\n", 0),
        ("@dataclass(frozen=True)\nclass A:\n    x: int\n    y: int\n    z: int\n    u: int\n", 1),
        ("@dataclass(frozen=True, kw_only=True)\nclass A:\n    x: int\n    y: int\n    z: int\n    u: int\n", 0),
        ("@dataclass(frozen=True, kw_only=True)\nclass A: ...\n@dataclass(frozen=True)\nclass B(A): ...\n", 1),
    ],
)
def test_wrong_declarations_are_found(source, problems):
    assert len(list(wrongly_declared(list(records_of("a", source))))) == problems
