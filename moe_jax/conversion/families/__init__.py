"""Families of models. Every `Family` that a module of this folder defines is found by itself."""

import importlib
import pkgutil

from moe_jax.conversion.families.family import Family
from moe_jax.core.errors import InputError, nearest


def _discover() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
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
