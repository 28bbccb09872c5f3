"""`ModelConfig` as JSON, versioned. Layers are written as runs of equal patterns, to be read by people."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from moe_jax.errors import InputError, nearest
from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.functional.rope import RopeConfig
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
    data["rope"] = _build(RopeConfig, data.get("rope", {}), "rope")
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
    moe = dict(data["moe"])
    moe["expert"] = _build(FFNConfig, moe["expert"], "moe.expert")
    moe["bank"] = _build(BankConfig, moe["bank"], "moe.bank")
    return LayerConfig(attention=attention, mlp=_build(MoEConfig, moe, "moe"))


def _build(cls: type, data: Mapping[str, Any], where: str) -> Any:
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
    return cls(**{key: _tuples(value, types_[key]) for key, value in data.items()})


def _tuples(value: Any, annotation: Any) -> Any:
    """JSON has lists only; a field declared as a tuple becomes one."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    is_tuple = any(typing.get_origin(option) is tuple for option in options)
    return tuple(value) if is_tuple and isinstance(value, list) else value
