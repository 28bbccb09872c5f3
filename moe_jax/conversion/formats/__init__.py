"""Formats of quantised checkpoints. Every one that a module of this folder defines is found, by its `quant_method`."""

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from typing import Any

from moe_jax.conversion.formats.quantized_format import QuantizationKeys, QuantizedFormat
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.model_io.lineage import SETTINGS

KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that describe a format; the second is the older name of the first."""
_OLDER = {"w_bit": "bits", "q_group_size": "group_size"}
_METHODS: dict[str, str] = dict(zip(SETTINGS, ("gptq", "awq"), strict=True))

_OF_CODES = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".qweight", ".SCB", ".weight.absmax", "_blocks")


def _discover() -> dict[str, type[QuantizedFormat]]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    values = (value for module in modules for value in vars(module).values())
    formats = {one for one in values if isinstance(one, type) and issubclass(one, QuantizedFormat)}
    return dict(sorted((method, one) for one in formats - {QuantizedFormat} for method in one.methods))


FORMATS = _discover()


def format_of(data: Mapping[str, Any]) -> QuantizedFormat | None:
    """Returns the format in which a checkpoint with these keys of config.json is quantised; None: it is not.

    Raises:
      InputError: if it is one that this library does not read, or its settings are.
    """
    inner = data.get("text_config")
    places = [data, inner] if isinstance(inner, Mapping) else [data]
    given = [(key, place[key]) for place in places for key in KEYS if place.get(key) not in (None, {})]
    if not given:
        return None
    key, settings = given[0]
    if not isinstance(settings, Mapping):
        raise InputError(f"config.json: {key!r} is {shown(settings)}, expected an object")
    return _format(settings, f"config.json: {key}")


def format_beside(name: str, settings: Mapping[str, Any]) -> QuantizedFormat:
    """Returns the format that a file of `SETTINGS` describes, as AutoGPTQ and AutoAWQ wrote them beside config.json.

    Raises:
      InputError: if it is one that this library does not read, or its settings are.
    """
    renamed = {_OLDER.get(key, key): value for key, value in settings.items()}
    return _format({"quant_method": _METHODS[name]} | renamed, name)


def _format(settings: Mapping[str, Any], where: str) -> QuantizedFormat:
    method = settings.get("quant_method", "compressed-tensors" if "config_groups" in settings else None)
    if not isinstance(method, str) or method not in FORMATS:
        hint = nearest(method, FORMATS) if isinstance(method, str) else ""
        raise InputError(f"{where}: unknown 'quant_method' {shown(method)}{hint}; known: {', '.join(FORMATS)}")
    return FORMATS[method].read(QuantizationKeys(settings, where))


def first_of_codes(tensors: Collection[str]) -> str | None:
    """Returns the name of a tensor that is one of codes; None: there is none."""
    return next((name for name in tensors if name.endswith(_OF_CODES)), None)


def check_no_codes(tensors: Collection[str]) -> None:
    """Raises `InputError` if names of tensors are those of codes, of which config.json says nothing."""
    found = first_of_codes(tensors)
    if found is not None:
        raise InputError(
            f"config.json has no 'quantization_config', and the checkpoint holds codes, such as {shown(found)}; fetch "
            "config.json again"
        )


def without_format(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of a config.json that describe the model, and not how its numbers are stored."""
    return {key: value for key, value in data.items() if key not in KEYS}
