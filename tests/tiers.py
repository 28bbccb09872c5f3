"""What `make test` leaves to `make test-all`: more cases of a property, and long runs of what short ones show too."""

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")

EVERY = os.environ.get("MOE_JAX_EVERY_TEST") == "1"

long = pytest.mark.skipif(not EVERY, reason="make test-all runs it")


def some(few: Iterable[Case], rest: Iterable[Case]) -> list[Case]:
    """The cases of a test: a few, and with `make test-all` the rest too."""
    return [*few, *(rest if EVERY else ())]
