"""Mutations that classes of inputs share: of bytes, and of what JSON says."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

# Values at the edges of types, each the wrong one somewhere.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-300, 1e38, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), -float("inf"),
    2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**6, 10**7, 10**10, 10**30, 10**400,
    "", "0", "1", "3", "true", "nan", "llama", "x" * 100_000, "\ud800", "\0", "../../x", "é", "a\nb",
    [], {}, [1], [[]], [None], [0.5], ["llama"], {"": 0}, {"a": {"b": 1}}, [1e400], [1] * 1000,
)  # fmt: skip


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    """One to three small damages: bits and bytes changed, pieces cut, repeated, moved or overwritten."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        data = chance.choice(_BYTE_MUTATIONS)(chance, data) if data else b"\0"
    return data


def mutated_tree(chance: random.Random, tree: Any) -> Any:
    """A parsed JSON file in which one to three values or keys are others."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return chance.choice(VALUES)
        tree = _mutated_at(chance, tree, *chance.choice(places))
    return tree


def mutated_json(chance: random.Random, tree: Any) -> bytes:
    """The text of a JSON file that says something else than `tree`, or is none any more."""
    if chance.random() < 0.75:
        return json_bytes(mutated_tree(chance, tree))
    text = json_bytes(tree)
    return chance.choice((mutated_bytes, _twice_the_key, _deep, _long_number, _other_encoding))(chance, text)


def json_bytes(tree: Any) -> bytes:
    """JSON as others write it: lone surrogates are escaped, numbers that are not finite have their names."""
    return json.dumps(tree).encode("ascii")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with a key or an index of it."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield tree, key
        yield from _places(value)


def _mutated_at(chance: random.Random, tree: Any, container: Any, key: Any) -> Any:
    choice = chance.random()
    if choice < 0.65:
        container[key] = copy.deepcopy(chance.choice(VALUES))
    elif choice < 0.75:
        del container[key]
    elif choice < 0.85:
        value = container[key]
        container[key] = {"list": [value], "dict": {"value": value}, "text": str(value)}[
            chance.choice(("list", "dict", "text"))
        ]
    elif choice < 0.95 and isinstance(container, dict):
        name = key + chance.choice(("x", " ", "\0", "S", "é")) if chance.random() < 0.7 else key[:-1]
        container[name] = container.pop(key)
    elif isinstance(container[key], int | float) and not isinstance(container[key], bool):
        container[key] = container[key] * chance.choice((-1, 2, 0.5, 3, 1000, 10**9, 1e300))
    else:
        return chance.choice(VALUES)
    return tree


def _flip(chance: random.Random, data: bytes) -> bytes:
    position = chance.randrange(len(data))
    return data[:position] + bytes([data[position] ^ (1 << chance.randrange(8))]) + data[position + 1 :]


def _byte(chance: random.Random, data: bytes) -> bytes:
    position = chance.randrange(len(data))
    return data[:position] + bytes([chance.randrange(256)]) + data[position + 1 :]


def _cut_end(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def _cut_out(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start + chance.randint(1, 64) :]


def _repeat(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data))
    stop = start + chance.randint(1, 256)
    return data[:stop] + data[start:stop] * chance.choice((1, 1, 2, 100)) + data[stop:]


def _insert(chance: random.Random, data: bytes) -> bytes:
    position = chance.randrange(len(data) + 1)
    return data[:position] + chance.randbytes(chance.randint(1, 16)) + data[position:]


def _overwrite(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data))
    length = min(chance.choice((1, 2, 4, 8)), len(data) - start)
    filler = chance.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"[", b"9"))
    return data[:start] + filler * length + data[start + length :]


def _exchange(chance: random.Random, data: bytes) -> bytes:
    a, b = sorted(chance.randrange(len(data)) for _ in range(2))
    length = min(chance.randint(1, 64), b - a, len(data) - b)
    return data[:a] + data[b : b + length] + data[a + length : b] + data[a : a + length] + data[b + length :]


_BYTE_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip, _flip, _flip, _byte, _cut_end, _cut_out, _repeat, _insert, _overwrite, _exchange,
)  # fmt: skip


def _twice_the_key(chance: random.Random, text: bytes) -> bytes:
    """The first key of the file again, with another value."""
    key = text[1 : text.find(b":")] if text.startswith(b"{") else b'"a"'
    return b"{" + key + b":" + json_bytes(chance.choice(VALUES)) + b"," + text[1:]


def _deep(chance: random.Random, text: bytes) -> bytes:
    """Brackets in brackets, whole or without an end, alone or as a value."""
    depth = chance.choice((500, 999, 5000, 100_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nest = opening * depth + b"1" + closing * (depth if chance.random() < 0.7 else 0)
    return nest if chance.random() < 0.5 else b'{"deep":' + nest + b"," + text[1:]


def _long_number(chance: random.Random, text: bytes) -> bytes:
    """A number of many digits in place of one that is there."""
    digits = chance.choice(
        (b"9" * 400, b"9" * 4000, b"1" * 5000, b"9" * 100_000, b"1e999999", b"-1e400", b"0." + b"0" * 5000 + b"1")
    )
    places = [i for i in range(len(text)) if text[i : i + 1].isdigit() and not text[i - 1 : i].isalnum()]
    if not places:
        return digits
    start = chance.choice(places)
    stop = start
    while text[stop : stop + 1] in b"0123456789.e+-" and stop < len(text):
        stop += 1
    return text[:start] + digits + text[stop:]


def _other_encoding(chance: random.Random, text: bytes) -> bytes:
    """Marks and encodings that are not plain UTF-8."""
    choice = chance.randrange(4)
    if choice == 0:
        return b"\xef\xbb\xbf" + text
    if choice == 1:
        return text.decode().encode(chance.choice(("utf-16", "utf-32", "utf-16-le")))
    return text.replace(b'"', b'"\xff', 1) if choice == 2 else text + chance.choice((b"\0", b"{}", b"//", b"]"))
