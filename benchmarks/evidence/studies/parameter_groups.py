"""The groups of parameters that have learning rates of their own."""

import re
from collections.abc import Iterable

# What the first pattern that is found in a path in memory makes of a parameter; anything else is `base`.
_PATTERNS = {
    "adapters": "/(lora|adapters)/",
    "router": "/router/",
    "deltas": "/experts/delta/",
    "experts": "/experts/(gate|up|down)/",
}
BASE = "base"
GROUPS = (*_PATTERNS, BASE)


def group_of(path: str) -> str:
    """The group of the parameter at a path in memory: one of `GROUPS`."""
    return next((group for group, pattern in _PATTERNS.items() if re.search(pattern, path)), BASE)


def groups_of(paths: Iterable[str]) -> tuple[str, ...]:
    """The groups that some parameters belong to, in the order of `GROUPS`, the base first."""
    found = {group_of(path) for path in paths}
    return tuple(group for group in (BASE, *_PATTERNS) if group in found)
