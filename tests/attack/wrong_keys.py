"""What a config can say wrongly, key by key: a list of changed configs, the same one every time."""

import copy
from collections.abc import Iterator
from typing import Any

MISSING = object()
"""In the place of a value: the key is left out."""

# Of any key, whatever its own value is.
_VALUES: tuple[Any, ...] = (
    MISSING, None, True, False, 0, -1, 0.5, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"),
    "", "1", "none", "a\nb", "x" * 10_000, [], [1], ["1"], [[1]], {}, {"value": 1},
)  # fmt: skip
# Of any number: next to its own, and sizes that nothing has but that fit into 32 or 64 bits.
_FACTORS = (-1, 2, 3, 1000)
_OFFSETS = (-1, 1)
_SIZES = (1, 3, 7, 1e-300, 10**6, 10**9, 2**31 - 1, 2**63 - 1)
_WORDS = ("no_such_word", "full_attention", "sliding_attention", "linear_attention", "mamba", "moe", "default", "relu")
# Keys that no family has, one like a key of many, and one that every object has in Python.
_UNKNOWN = {"hidden_sizes": 32, "no_such_key": 1, "num_expert": 4, "__class__": "x", "": 0, "a\nb": 0, "é": None}


Change = tuple[tuple[tuple[Any, ...], Any], ...]
"""Places in a config, each a path of keys and indices, with the value that each gets."""


def changes_of(config: dict[str, Any]) -> Iterator[Change]:
    """Yields changes that make something of a config wrong: keys one at a time, then pairs of sizes.

    A change gives a key a value of another type, none, zero, a negative, huge or infinite number, or a list of another
    length; gives two sizes that have to divide or bound each other values that do not; or adds an unknown key.
    """
    for path, value in _places(config, ()):
        for other in _others(value):
            yield ((path, other),)
    for key, value in _UNKNOWN.items():
        yield (((key,), value),)
    sizes = [key for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)]
    for first, second in zip(sizes, sizes[1:] + sizes[:1], strict=True):
        for a, b in ((0, 0), (5, 3), (3, 5), (2**20, 2**20)):
            yield (((first,), a), ((second,), b))


def changed(config: dict[str, Any], change: Change) -> dict[str, Any]:
    """Returns a copy of a config with a change."""
    config = copy.deepcopy(config)
    for path, other in change:
        inside: Any = config
        for key in path[:-1]:
            inside = inside[key]
        if other is MISSING:
            del inside[path[-1]]
        else:
            inside[path[-1]] = copy.deepcopy(other)
    return config


def said_of(change: Change) -> str:
    """Returns a change in a few words."""
    return ", ".join(f"{'.'.join(map(str, path))!r} {_value(other)}" for path, other in change)


def _value(other: Any) -> str:
    return "is missing" if other is MISSING else f"= {other!r:.60} ({type(other).__name__})"


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every key and every index below a value, with what is there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key), inner
        yield from _places(inner, (*path, key))


def _others(value: Any) -> Iterator[Any]:
    yield from _VALUES
    if isinstance(value, bool):
        yield from (not value, int(value), str(value))
    elif isinstance(value, int | float):
        yield from (*(value * factor for factor in _FACTORS), *(value + offset for offset in _OFFSETS), *_SIZES)
        yield from (str(value), [value], {"value": value}, float(value))
    elif isinstance(value, str):
        yield from (*_WORDS, value.upper(), f"{value} ", value[:-1], value[::-1], [value], {value: value})
    elif isinstance(value, list):
        yield from (value[:-1], value[1:], value + value[-1:], value + value, value[::-1], [value], [None] * len(value))
        yield from ([value[:1]] * len(value), value[:1] * 100_000, dict.fromkeys(map(str, value)), str(value))
    elif isinstance(value, dict):
        yield from ([value], list(value), str(value), {"value": value}, value | {"no_such_key": 1}, value | {"": None})
