"""Families of models. Every `Family` that a module of this folder, or of one in it, defines is found by itself.

`dense/` has dense models and their relatives with experts, `moe/` those that are Mixtures-of-Experts from the first,
`hybrid/` those of which some layers have a recurrence in the place of attention, and `towers/` image encoders; what
most of them share stands beside these.
"""

import importlib
import pkgutil

from moe_jax.conversion.families.family import Family
from moe_jax.core.errors import InputError, nearest


def _discover() -> dict[str, Family]:
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(__path__, f"{__name__}.")]
    found = {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Family)}
    return dict(sorted(found.items()))


FAMILIES = _discover()


def family_named(name: str) -> Family:
    """Returns the family called `name`.

    Raises:
      InputError: if there is none; lists the existing ones.
    """
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(f"unknown model family {name!r}{nearest(name, FAMILIES)}; known families: {known}")
    return FAMILIES[name]
