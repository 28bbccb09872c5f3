"""The texts of all errors are in one table, `messages.txt`; tests ask for the type, the key and the place alone.

    python -m tests.project.test_messages

writes the table again. Who changes a message changes its line there, where a reader sees old and new side by side.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.support.environment import ROOT

TABLE = pathlib.Path(__file__).with_name("messages.txt")
# So many plain words in a row are a sentence, and no longer a key or a place.
MOST_WORDS = 3
_PLAIN = re.compile(r"[A-Z]?[a-z]+(?:'[a-z]+)?[,;]?")


def messages_of(source: str) -> Iterator[tuple[str, str]]:
    """Yields the type and the text of each error that a module raises, `{...}` where a value is put in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            for text in _texts(node.exc.args[-1]):
                yield ast.unparse(node.exc.func).rpartition(".")[2], text


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield " ".join(node.value.split())
    elif isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else "{...}" for part in node.values)
        yield " ".join("".join(parts).split())
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield from _texts(node.left)
        yield from _texts(node.right)


def table() -> str:
    """Returns the table: the errors of each room, by their texts."""
    rooms: dict[str, set[str]] = {}
    for file in sorted((ROOT / "moe_jax").rglob("*.py")):
        found = rooms.setdefault(file.relative_to(ROOT / "moe_jax").parts[0], set())
        found.update(f"{kind}: {text}" for kind, text in messages_of(file.read_text(encoding="utf-8")))
    return "\n".join("\n".join([f"# {room}", *sorted(texts), ""]) for room, texts in rooms.items() if texts)


def sentences_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each `match=` that asks for more than `MOST_WORDS` plain words in a row."""
    for node in ast.walk(ast.parse(source)):
        for constant in ast.walk(node.value) if isinstance(node, ast.keyword) and node.arg == "match" else ():
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                words = [bool(_PLAIN.fullmatch(word)) for word in constant.value.split(" ")]
                if any(all(words[i : i + MOST_WORDS + 1]) for i in range(len(words) - MOST_WORDS)):
                    yield constant.lineno, constant.value


def test_the_table_has_every_message():
    texts = table()
    assert texts.count("InputError: ") > 500
    assert TABLE.read_text(encoding="utf-8") == texts, "run: python -m tests.project.test_messages"


def test_no_test_pins_a_sentence():
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "benchmarks" / "tests").rglob("test_*.py")]
    assert len(files) > 100
    found = [f"{file.relative_to(ROOT)}:{line}: {text!r}" for file in sorted(files)
             for line, text in sentences_of(file.read_text(encoding="utf-8"))]  # fmt: skip
    assert not found, "ask for the type, the key and the place; the text is in messages.txt:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise InputError(f'{path}: no {thing!r}')", [("InputError", "{...}: no {...}")]),
        ("raise errors.InputError('a' if x else 'b')", [("InputError", "a"), ("InputError", "b")]),
        ("raise OSError(5, 'the  disk')", [("OSError", "the disk")]),
        ("raise\nraise error\nraise KeyError(key)", []),
    ],
)
def test_messages_are_found(source, found):
    assert list(messages_of(source)) == found


@pytest.mark.parametrize(
    ("pattern", "is_sentence"),
    [("the model is dense", True), ("model is dense", False), ("--kind: expected one of", False), ("a 2 b c d", False)],
)
def test_sentences_are_found(pattern, is_sentence):
    assert bool(list(sentences_of(f"raises(InputError, match={pattern!r})"))) == is_sentence


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
