"""The part of `make lint` that takes less than a second, and two rules that are not in it; pyright takes longer."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.environment import ROOT

# That lists are equally long is said where they are walked together.
STRICT = ("check", "--select", "B905", "moe_jax", "train", "convert")
# How many arguments a method of text files has before its encoding.
BEFORE = {"read_text": 0, "write_text": 1}


@pytest.mark.parametrize(
    "arguments", [("check", "."), ("format", "--check", "."), STRICT], ids=["rules", "format", "strict"]
)
def test_ruff_finds_nothing(arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def without_encoding(source: str) -> Iterator[int]:
    """Yields the lines where text is read or written in whatever encoding the machine prefers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BEFORE:
            if len(node.args) <= BEFORE[node.func.attr] and not any(one.arg == "encoding" for one in node.keywords):
                yield node.lineno


def test_text_is_read_and_written_in_a_named_encoding():
    files = [file for folder in ("moe_jax", "train", "convert") for file in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in without_encoding(file.read_text("utf-8"))]
    assert files and not found
    assert list(
        without_encoding("a.read_text()\na.write_text(b)\na.read_text('utf-8')\na.write_text(b, encoding='x')")
    ) == [1, 2]
