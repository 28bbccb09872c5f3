"""Hugging Face config.json <-> ModelConfig, for all families."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from moe_jax.convert.families import FAMILIES, family_named
from moe_jax.convert.foreign_config import ForeignConfig
from moe_jax.errors import InputError, raise_if_any, shown
from moe_jax.models import ModelConfig

# Settings of training and storage, which foreign formats do not store and which do not change the logits.
_NOT_COMPARED = {"family", "foreign", "dtype", "balance_coef", "z_coef", "cv_coef", "capacity_factor"}


def read_hf_config(data: Mapping[str, Any], *, ignored: Collection[str] = ()) -> ModelConfig:
    """Reads a config.json, in the style of Transformers 4 or 5.

    Args:
      data: the parsed file.
      ignored: unknown keys that are taken to change nothing.

    Returns:
      The config; keys that this library does not use are kept in `foreign`.

    Raises:
      InputError: unknown family; missing, ill-typed or contradicting values; or keys that are not known, and so may
        change what the model computes.
    """
    if data.get("quantization_config") is not None:
        raise InputError(
            "config.json: the checkpoint is quantised (quantization_config); convert the unquantised one it was made of"
        )
    family = FAMILIES[_family_name(data)]
    foreign = ForeignConfig(data, family.defaults)
    config = family.read(foreign)
    foreign.check_all_known(family.harmless, ignored)
    return config


def write_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of `config` in the format of its family.

    The result is read back and compared, so that a format that cannot express something is an error and never
    a silent loss. (Coefficients of auxiliary losses and the expert capacity in training may be lost.)

    Raises:
      InputError: if the format cannot express the model.
    """
    written = _write(config)
    lost = _differences(config, read_hf_config(written))
    raise_if_any(lost, f"the format of {config.family!r} cannot hold this model")
    return _merged(written, config.foreign)


def foreign_keys(config: ModelConfig) -> set[str]:
    """The keys that a config writes back without knowing them, as `read_hf_config` wants to have them ignored."""
    inner = {f"{key}.{one}" for key, value in config.foreign.items() if isinstance(value, Mapping) for one in value}
    return {*config.foreign, *inner}


def what_is_lost(config: ModelConfig) -> list[str]:
    """What the format of its family cannot say of a model, one sentence each; none if `write_hf_config` writes it."""
    try:
        return _differences(config, read_hf_config(_write(config)))
    except InputError as error:
        return [str(error)]


def _write(config: ModelConfig) -> dict[str, Any]:
    family = family_named(config.family)
    return {"architectures": [family.architecture], "model_type": family.name, **family.write(config)}


def _family_name(data: Mapping[str, Any]) -> str:
    name = data.get("model_type")
    if name is None:
        by_architecture = {family.architecture: family.name for family in FAMILIES.values()}
        architectures = data.get("architectures") or []
        names = [one for one in architectures if isinstance(one, str)] if isinstance(architectures, list) else []
        name = next((by_architecture[one] for one in names if one in by_architecture), None)
        if name is None:
            raise InputError(
                f"config.json has no model_type and architectures {shown(architectures)}; "
                f"known: {', '.join(by_architecture)}"
            )
    if not isinstance(name, str) or name not in FAMILIES:
        if isinstance(data.get("text_config"), Mapping):
            raise InputError(
                f"config.json: {shown(name)} is a model of text and more (it has a text_config); save its language "
                "model alone, with a config.json of its own, and convert that"
            )
        raise InputError(f"config.json: unknown model_type {shown(name)}; known families: {', '.join(FAMILIES)}")
    return name


def _merged(written: Mapping[str, Any], foreign: Mapping[str, Any]) -> dict[str, Any]:
    """Adds foreign keys to the written ones, also inside objects; written keys take precedence."""
    result = dict(written)
    for key, value in foreign.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _merged(result[key], value)
        else:
            result.setdefault(key, value)
    return result


def _differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """What a config lost by being written, one sentence per field; layers with equal losses share a sentence."""
    found = _fields_that_differ("", ours, theirs)
    if ours.num_layers == theirs.num_layers:
        by_loss: dict[str, list[int]] = {}
        for i, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
            for loss in _fields_that_differ("", a, b):
                by_loss.setdefault(loss, []).append(i)
        for loss, indices in by_loss.items():
            where = f"layer {indices[0]}" if len(indices) == 1 else f"{len(indices)} layers (first: {indices[0]})"
            found.append(f"{where}: {loss}")
    return found


def _fields_that_differ(prefix: str, ours: Any, theirs: Any) -> list[str]:
    if type(ours) is not type(theirs):
        # Parts that come in kinds are called by them, as in config.json.
        names = (getattr(part, "kind", type(part).__name__) for part in (ours, theirs))
        return ["{} is {!r}, the format can only say {!r}".format(prefix.removesuffix("."), *names)]
    found = []
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if a == b or field.name in _NOT_COMPARED or field.name == "layers":
            continue
        if dataclasses.is_dataclass(a):
            found += _fields_that_differ(f"{prefix}{field.name}.", a, b)
        else:
            found.append(f"{prefix}{field.name} is {shown(a)}, the format can only say {shown(b)}")
    return found
