"""Docstrings say what something returns or does, in plain word order: a stranger reads them before the code."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.support.environment import ROOT

# Rooms whose docstrings are still to be rewritten. The list only shrinks.
UNFINISHED = (*("api", "checkpoints", "commands", "files", "model_io", "peft", "upcycling"),)
# "What there is of ..." is a riddle; "Returns the bytes of ..." is not.
_RIDDLE = re.compile(r"(What|That|Those|Of|Which|Where)\b")
_ONLY_SEE = re.compile(r"See (also )?`[^`]*`\.?$")


def problems_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the problem of each docstring that a stranger would not understand, or that is missing."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ()
        for before, child in zip([None, *body], body, strict=False):
            # The text under a field is help for an option: "Where the report appears" is plain there.
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if is_text and isinstance(child.value.value, str) and not isinstance(before, ast.AnnAssign):
                if problem := _problem(child.value.value):
                    yield child.lineno, problem
    yield from _undocumented(tree, inherits=False)


def _problem(docstring: str) -> str | None:
    words = " ".join(docstring.split())
    if _RIDDLE.match(words):
        return f"begins with {words.split()[0]!r}: say what it returns or does"
    if _ONLY_SEE.match(words):
        return f"{words!r} sends the reader elsewhere: say it in one line, or leave it to the base class"
    return f"{words!r} is too short" if len(words.split()) < 3 else None


def _undocumented(node: ast.AST, *, inherits: bool) -> Iterator[tuple[int, str]]:
    """Yields public functions and classes without a docstring; a method may inherit the one of its base class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_public = not child.name.startswith("_") and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            is_protocol_stub = isinstance(child, ast.FunctionDef) and ast.unparse(child.body[-1]) == "..."
            if is_public and not (inherits or is_protocol_stub or ast.get_docstring(child)):
                yield child.lineno, f"{child.name} has no docstring"
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _undocumented(child, inherits=bool(child.bases))


def is_finished(file: pathlib.Path) -> bool:
    path = file.relative_to(ROOT / "moe_jax").as_posix()
    return not any(path == room or path.startswith(f"{room}/") for room in UNFINISHED)


def test_docstrings_say_what_is_returned_or_done():
    files = [file for file in sorted((ROOT / "moe_jax").rglob("*.py")) if is_finished(file)]
    assert len(files) > 100
    found = [f"{file.relative_to(ROOT)}:{line}: {problem}" for file in files
             for line, problem in problems_of(file.read_text(encoding="utf-8"))]  # fmt: skip
    assert not found, "docstrings that a stranger would not understand:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "is_fine"),
    [
        ("Returns the path of the source.", True),
        ("Number of experts of a layer.", True),
        ("Whether a leaf is stored in codes.", True),
        ("What there is of a leaf.", False),
        ("Those of a bank.", False),
        ("Of the experts, their number.", False),
        ("See `KernelForm`.", False),
        ("Returns a tile; see `KernelForm`.", True),
        ("All lines.", False),
    ],
)
def test_what_counts_as_plain(docstring, is_fine):
    assert (not list(problems_of(f'def f():\n    """{docstring}"""'))) == is_fine


def test_public_functions_need_a_docstring():
    source = "def f(): pass\ndef _g(): pass\nclass A(B):\n  def h(self): pass\nclass _C:\n  def k(self): return 1"
    assert [line for line, _ in problems_of(source)] == [1, 3]
