"""Numbers as people write and read them."""

import re

import pytest

from moe_jax.core.errors import InputError, shown
from moe_jax.core.formatting import index_set, parse_bytes, show_bytes, show_duration


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12GB", 12 * 10**9), ("800MB", 8 * 10**8), ("500 MB", 5 * 10**8), ("1.5 GiB", 3 * 2**29), ("2GiB", 2**31),
        ("1.5kb", 1500), ("4096", 4096), ("2kb", 2000), ("7B", 7), (7, 7),
    ],
)  # fmt: skip
def test_bytes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "12 G B", "1e9", "-1GB", "12,5MB", "0GB", "0.5", 0, "9" * 20, "9" * 400 + "TB"]
)
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(InputError, match="^--room .*: expected bytes, .* 12GB"):
        parse_bytes(text, flag="--room")
    with pytest.raises(InputError, match=f"^{re.escape(shown(text))}: expected bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (93_400_000_000, "93.4 GB"),
        (2_500_000_000_000, "2.5 TB"),
    ],
)  # fmt: skip
def test_bytes_are_shown(count, text):
    assert show_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (7265, "2:01:05")])
def test_durations(seconds, text):
    assert show_duration(seconds) == text


@pytest.mark.parametrize(
    ("indices", "text"),
    [([3], "3"), (range(6), "{0..5}"), (range(1, 32, 2), "{1..31..2}"), ([0, 3, 4], "{0,3,4}"), ([2, 7], "{2,7}")],
)
def test_index_set(indices, text):
    assert index_set(indices) == text
