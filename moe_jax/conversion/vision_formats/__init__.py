"""Formats of models that see, around the format of a language model. Every one that a module here defines is found."""

import importlib
import pkgutil

from moe_jax.conversion.vision_formats.vision_format import VisionFormat
from moe_jax.core.errors import InputError, nearest


def _discover() -> dict[str, VisionFormat]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    values = (value for module in modules for value in vars(module).values())
    return dict(sorted((value.name, value) for value in values if isinstance(value, VisionFormat)))


VISION_FORMATS = _discover()
MODEL_TYPES = {name: format_ for name, format_ in VISION_FORMATS.items() if format_.text_key is not None}
"""The formats that have a `model_type` of their own."""


def vision_format_named(name: str) -> VisionFormat:
    """Returns the format called `name`; raises `InputError` if there is none, and lists the existing ones."""
    if name not in VISION_FORMATS:
        known = ", ".join(VISION_FORMATS)
        raise InputError(f"unknown format of models that see: {name!r}{nearest(name, VISION_FORMATS)}; known: {known}")
    return VISION_FORMATS[name]
