"""Patterns that somebody else wrote: the same matches as Python's, and an end to every one of them."""

import re
import time

import pytest

from moe_jax.peft.trained import full_matches

NAMES = [f"layers/{i}/{part}" for i in range(12) for part in ("attention/q/kernel", "mlp/router/kernel", "norm/scale")]


def test_matches_are_those_of_python():
    patterns = [".*", "layers/1/.*", "layers/(?!0/).*", r"layers/\d/.*/(q|router)/kernel", "router", "", ".*é"]
    assert full_matches(patterns, NAMES) == [{n for n in NAMES if re.fullmatch(p, n)} for p in patterns]
    assert full_matches([], NAMES) == [] and full_matches(["a"], []) == [set()]


@pytest.mark.parametrize("pattern", ["(", "a{9999999999}", "*", "(?P<a>x)(?P<a>y)", "(" * 50_000, "\ud800("])
def test_what_is_no_pattern_is_said(pattern):
    good, bad, last = full_matches([".*/scale", pattern, ".*/scale"], NAMES)
    assert isinstance(bad, str) and bad.startswith("is not a regular expression: ")
    assert good == last == {name for name in NAMES if name.endswith("/scale")}


def test_a_pattern_that_does_not_end_is_ended():
    begun = time.monotonic()
    patterns = [".*/scale", "(([a-z/0-9]+)+)+!", ".*"]
    good, endless = full_matches(patterns, ["layers/0/attention/q/kernel/" * 3, "norm/scale"])
    assert good == {"norm/scale"}
    assert endless == "takes too long to match; write it without repetitions inside repetitions"
    assert time.monotonic() - begun < 30
