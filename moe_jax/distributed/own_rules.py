"""Sharding rules for parameters of users' own routers and layers, which come after the library's."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.distributed.mesh_axes import AXES


class _Rules(NamedTuple):
    """The rules of a part: where its parameters are, and the specs by their paths below it."""

    places: str
    named: dict[str, P]


_rules: dict[str, _Rules] = {}


def add_rules(part: str, places: str, shardings: Mapping[str, P]) -> None:
    """Adds rules for the parameters of a part, in the place of earlier ones of the same part.

    Args:
      part: name of the part.
      places: regular expression of the paths at which such parts are, such as `.*/router`.
      shardings: PartitionSpec of an unstacked leaf by its path below the part, a regular expression. A leaf without one
        is whole on every device.

    Raises:
      InputError: for what is no PartitionSpec of axes of a mesh, or no regular expression; or if another part has a
        parameter of the same name that is split differently.
    """
    if not isinstance(shardings, Mapping):
        raise InputError(f"shardings of {part!r} are {shown(shardings)}, expected specs by paths of parameters")
    for path, spec in shardings.items():
        if not isinstance(spec, P):
            raise InputError(f"shardings[{shown(path)}] of {part!r} is {shown(spec)}, expected a PartitionSpec")
        for entry in spec:
            for axis in entry if isinstance(entry, tuple) else () if entry is None else (entry,):
                check_member(f"axis in shardings[{shown(path)}] of {part!r}", axis, AXES)
        try:
            re.compile(path)
        except (re.error, TypeError):
            raise InputError(f"shardings of {part!r}: {shown(path)} is no regular expression of a path") from None
        for name, other in _rules.items():
            if name != part and other.places == places and other.named.get(path, spec) != spec:
                raise InputError(
                    f"shardings of {part!r}: {path!r} is split by {spec}, and that of {name!r} by {other.named[path]}; "
                    "one name of a parameter has one place on a mesh: choose another name"
                )
    _rules[part] = _Rules(places, dict(shardings))


def own_spec(path: str) -> P | None:
    """Returns the PartitionSpec of a parameter; None: it is of no part that has rules."""
    for places, named in _rules.values():
        for below, spec in named.items():
            if re.fullmatch(f"(?:{places})/(?:{below})", path):
                return spec
    return P() if any(re.fullmatch(f"(?:{rules.places})/.*", path) for rules in _rules.values()) else None
