"""One small file per family, by kind of model. Every module defines a `FAMILY`; none has to be registered."""

import importlib
import pkgutil

from moe_jax.conversion.families.parts.family import Family
from moe_jax.core.errors import InputError, nearest

KINDS = ("dense", "moe", "encoder_decoder")


def _discover() -> dict[str, Family]:
    """Returns the families of all kinds, in the order of their modules' names."""
    kinds = [importlib.import_module(f"{__name__}.{kind}") for kind in KINDS]
    modules = [(info.name, kind.__name__) for kind in kinds for info in pkgutil.iter_modules(kind.__path__)]
    families = [importlib.import_module(f"{kind}.{module}").FAMILY for module, kind in sorted(modules)]
    return {family.name: family for family in families}


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
