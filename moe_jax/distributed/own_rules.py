"""Sharding rules for parameters of users' own routers and layers, which come after the library's."""

import re
from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

_named: dict[str, P] = {}
_whole: set[str] = set()


def add_rules(part: str, shardings: Mapping[str, P]) -> None:
    """Adds rules for the parameters of a part; those without one are whole on every device.

    Args:
      part: regular expression of the path of the part, such as `.*/router`.
      shardings: PartitionSpec of an unstacked leaf by its path below the part, a regular expression.
    """
    _named.update({f"({part})/{path}": spec for path, spec in shardings.items()})
    _whole.add(f"({part})/.*")


def own_spec(path: str) -> P | None:
    """Returns the PartitionSpec of a parameter; None: it is of no part that has rules."""
    for pattern, spec in _named.items():
        if re.fullmatch(pattern, path):
            return spec
    return P() if any(re.fullmatch(pattern, path) for pattern in _whole) else None
