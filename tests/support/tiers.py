"""What `make test` leaves to `make test-all`: more cases of a property, and long runs of what short ones show too."""

import os
from collections import Counter
from typing import Any

import pytest

EVERY = os.environ.get("MOE_JAX_EVERY_TEST") == "1"

long = pytest.mark.long
"""Of a test that only `make test-all` runs."""

MARKERS = (
    "long: only `make test-all` runs the test",
    "one_in(n, first=0): `make test` runs one in n of the cases of the test, from the first on",
)


def one_in(n: int, *, first: int = 0) -> pytest.MarkDecorator:
    """Of a test with many cases, of which `make test` runs every n-th; no common factor with a list spreads them."""
    return pytest.mark.one_in(n, first=first)


def examples(most: int) -> int:
    """So many examples of a property that compiles a program for nearly each, of which `make test` has a third."""
    return most if EVERY else max(2, most // 3)


def first(few: int, *cases: Any) -> tuple[Any, ...]:
    """Cases for each of which a program is compiled, of which `make test` has the first few."""
    return cases if EVERY else cases[:few]


def chosen(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """The tests to run, and those that are left to `make test-all`."""
    seen: Counter[str] = Counter()
    run, left = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        number, mark = seen[test], item.get_closest_marker("one_in")
        seen[test] += 1
        skipped = mark is not None and number % mark.args[0] != mark.kwargs["first"]
        (left if not EVERY and (skipped or item.get_closest_marker("long")) else run).append(item)
    return run, left
