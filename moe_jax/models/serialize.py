"""`ModelConfig` as JSON, versioned. Layers are written as runs of equal patterns, to be read by people."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_jax import strict
from moe_jax.errors import InputError
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


def config_from_json(data: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Rebuilds a config; unknown keys, missing keys, wrong types and other versions are errors.

    Args:
      data: what `config_to_json` returned, after JSON.
      where: the file, named in errors.

    Raises:
      InputError: if `data` is not what `config_to_json` writes; all problems are listed.
    """
    fields = strict.without_format(data, FORMAT, VERSION, where=where)
    runs = {"segments": fields.pop("segments")} if "segments" in fields else {}
    segments = strict.parse(_Segments, runs, where=where, language="JSON").segments
    layers = tuple(layer.config() for run in segments for _ in range(run.repeats) for layer in run.pattern)
    return strict.parse(ModelConfig, {**fields, "layers": layers}, where=where, language="JSON")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer as it is written: its FFN is called `ffn`, its MoE `moe`."""

    attention: AttentionConfig
    ffn: FFNConfig | None = None
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        if (self.ffn is None) == (self.moe is None):
            raise InputError("a layer has either 'ffn' or 'moe'")

    def config(self) -> LayerConfig:
        return LayerConfig(attention=self.attention, mlp=self.ffn if self.moe is None else self.moe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A pattern of layers and how often it is repeated."""

    repeats: int
    pattern: tuple[_Layer, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segments:
    segments: tuple[_Run, ...]


def _layer_to_json(layer: LayerConfig) -> dict[str, Any]:
    kind = "moe" if isinstance(layer.mlp, MoEConfig) else "ffn"
    return {"attention": dataclasses.asdict(layer.attention), kind: dataclasses.asdict(layer.mlp)}
