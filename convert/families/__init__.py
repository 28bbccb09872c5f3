"""One small file per family. Every module here defines a `FAMILY`, which is found without being registered."""

import importlib
import pkgutil

from moe_jax.convert.families._shared import Family
from moe_jax.errors import InputError, nearest


def _discover() -> dict[str, Family]:
    modules = [info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")]
    families = [importlib.import_module(f"{__name__}.{module}").FAMILY for module in sorted(modules)]
    return {family.name: family for family in families}


FAMILIES = _discover()


def family_named(name: str) -> Family:
    """Returns the family called `name`.

    Raises:
      InputError: if there is none; lists those there are.
    """
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(f"unknown model family {name!r}{nearest(name, FAMILIES)}; known families: {known}")
    return FAMILIES[name]
