"""`ModelConfig` as JSON, versioned. Layers are written as runs of equal patterns, to be read by people."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from moe_jax.errors import InputError, nearest
from moe_jax.experts.config import FFNConfig
from moe_jax.models.config import AttentionConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.models.segments import segments_of

FORMAT = "moe_jax.model"
VERSION = 1


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Returns a JSON-able dict from which `config_from_json` rebuilds an equal config."""
    fields = dataclasses.asdict(config)
    del fields["layers"]
    fields["foreign"] = dict(config.foreign)
    fields["segments"] = [
        {"repeats": segment.repeats, "pattern": [_layer_to_json(layer) for layer in segment.pattern]}
        for segment in segments_of(config.layers)
    ]
    return {"format": FORMAT, "version": VERSION, **fields}


def config_from_json(data: Mapping[str, Any]) -> ModelConfig:
    """Rebuilds a config; unknown keys, missing keys and other versions are errors.

    Raises:
      InputError: if `data` is not what `config_to_json` writes.
    """
    data = dict(data)
    if data.pop("format", None) != FORMAT:
        raise InputError(f"config.json is not a moe_jax model config: it has no format {FORMAT!r}")
    version = data.pop("version", None)
    if version != VERSION:
        raise InputError(f"config.json has version {version}, this library reads version {VERSION}")
    if not isinstance(data.get("segments"), list):
        raise InputError("config.json has no list of segments")
    layers: list[LayerConfig] = []
    for segment in data.pop("segments"):
        pattern = [_layer_from_json(layer) for layer in segment["pattern"]]
        layers.extend(pattern * segment["repeats"])
    return _build(ModelConfig, {**data, "layers": tuple(layers)}, "config.json")


def _layer_to_json(layer: LayerConfig) -> dict[str, Any]:
    kind = "moe" if isinstance(layer.mlp, MoEConfig) else "ffn"
    return {"attention": dataclasses.asdict(layer.attention), kind: dataclasses.asdict(layer.mlp)}


def _layer_from_json(data: Mapping[str, Any]) -> LayerConfig:
    attention = _build(AttentionConfig, data["attention"], "attention")
    if "ffn" in data:
        return LayerConfig(attention=attention, mlp=_build(FFNConfig, data["ffn"], "ffn"))
    if "moe" not in data:
        raise InputError(f"a layer in config.json has neither 'ffn' nor 'moe': {sorted(data)}")
    return LayerConfig(attention=attention, mlp=_build(MoEConfig, data["moe"], "moe"))


def _build(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise InputError(f"{where} is {data!r}, expected an object")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise InputError(f"unknown key {key!r} in {where}{nearest(key, fields)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in data and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(f"{where} lacks {', '.join(missing)}")
    types_ = typing.get_type_hints(cls)
    return cls(**{key: _value(value, types_[key], f"{where}.{key}") for key, value in data.items()})


def _value(value: Any, annotation: Any, where: str) -> Any:
    """A field declared as a dataclass becomes one, and one declared as a tuple too: JSON has lists only."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    nested = next((option for option in options if dataclasses.is_dataclass(option)), None)
    if nested is not None and value is not None and not dataclasses.is_dataclass(value):
        return _build(nested, value, where)
    is_tuple = any(typing.get_origin(option) is tuple for option in options)
    return tuple(value) if is_tuple and isinstance(value, list) else value
