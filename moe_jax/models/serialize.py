"""`ModelConfig` as versioned JSON. Layers are written as runs of equal patterns, which people can read."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from moe_jax.core.errors import InputError, check_positive
from moe_jax.experts.shapes import FFNConfig, NoFFNConfig
from moe_jax.files import json_toml
from moe_jax.models.attention_config import AttentionConfig
from moe_jax.models.config import ModelConfig, VisionConfig, check_num_layers
from moe_jax.models.layer_config import LayerConfig
from moe_jax.models.linear_codes import LinearCodes
from moe_jax.models.moe_config import MoEConfig
from moe_jax.models.own_parts import BLOCK
from moe_jax.models.recurrent_config import RECURRENT, DeltaRuleConfig, Mamba2Config, NoAttentionConfig, ShortConvConfig
from moe_jax.models.segments import segments_of

FORMAT = "moe_jax.model"
# Version 2: codes of a quantised delta stand for all 2^bits levels. Version 1 had as many bits, with other meanings.
VERSION = 2

# Fields of attention that older files lack.
_NEWER_OF_MOE = (
    *("router", "router_bias", "weighs_inputs", "branch_norm_eps", "expert_scales", "balance_choices"),
    *("capacity_rows", "sequence_balance_coef"),
)
_NEWER = ("rope_interleaved", "sinks", "output_gate", "block_tokens", "query_scale", "values_are_keys", "value_norm")


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Returns a JSON-able dict from which `config_from_json` rebuilds an equal config."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del fields["layers"]
    fields["rope"] = dataclasses.asdict(config.rope)
    fields["foreign"] = dict(config.foreign)
    # As in older files, whose fingerprints are noted elsewhere.
    for name in ("balance_over", "patches", "vision", "further_layers", "codes"):
        if fields[name] == getattr(ModelConfig, name):
            del fields[name]
    if config.codes:
        fields["codes"] = [dataclasses.asdict(one) for one in config.codes]
    if config.patches is not None:
        fields["patches"] = dataclasses.asdict(config.patches)
    if config.vision is not None:
        fields["vision"] = _vision_to_json(config.vision)
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
      InputError: if `data` is not what `config_to_json` writes, all problems listed; or if it is of version 1, in which
        codes had other meanings, and describes quantised experts.
    """
    is_first = data.get("version") == 1 and data["version"] is not True
    fields = json_toml.without_format({**data, "version": VERSION} if is_first else data, FORMAT, VERSION, where=where)
    runs = {"segments": _with_biases(fields.pop("segments"))} if "segments" in fields else {}
    if "layers" in fields:
        raise InputError(f"{where}: unknown key 'layers'; layers are written as 'segments'")
    segments = json_toml.parse(_Segments, runs, where=where, language="JSON").segments
    try:
        check_num_layers(sum(run.repeats * len(run.pattern) for run in segments))
        layers = tuple(layer for run in segments for layer in [one.config() for one in run.pattern] * run.repeats)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if is_first and any(isinstance(layer.mlp, MoEConfig) and layer.mlp.bank.form.has_codes for layer in layers):
        raise InputError(
            f"{where} has version 1, in which the codes of quantised experts stood for other levels than they do now; "
            "compress the original model again"
        )
    if isinstance(fields.get("vision"), Mapping):
        fields["vision"] = _vision_from_json(fields["vision"], where=f"{where}: vision")
    return json_toml.parse(ModelConfig, {**fields, "layers": layers}, where=where, language="JSON")


def _vision_to_json(vision: VisionConfig) -> dict[str, Any]:
    fields = {field.name: getattr(vision, field.name) for field in dataclasses.fields(vision)}
    processing, foreign = dataclasses.asdict(vision.processing), dict(vision.foreign)
    if not any(vision.frame):
        del fields["frame"]
    return fields | {"tower": config_to_json(vision.tower), "processing": processing, "foreign": foreign}


def _vision_from_json(fields: Mapping[str, Any], *, where: str) -> VisionConfig:
    tower = fields.get("tower")
    if not isinstance(tower, Mapping):
        raise InputError(f"{where}: 'tower' is missing, expected the config of an image encoder")
    tower = config_from_json(tower, where=f"{where}.tower")
    return json_toml.parse(VisionConfig, {**fields, "tower": tower}, where=where, language="JSON")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer as it is written: its FFN is called `ffn`, its MoE `moe`, a recurrence as in `RECURRENT`."""

    attention: AttentionConfig | None = None
    delta_rule: DeltaRuleConfig | None = None
    short_conv: ShortConvConfig | None = None
    mamba2: Mamba2Config | None = None
    no_attention: NoAttentionConfig | None = None
    ffn: FFNConfig | None = None
    moe: MoEConfig | None = None
    no_ffn: NoFFNConfig | None = None
    cross: AttentionConfig | None = None
    norm_position: Literal["pre", "post", "output", "both"] = "pre"
    parallel: bool = False
    shared_norm: bool = False
    branch_scales: bool = False
    residual_scale: float = 1.0
    output_scale: bool = False
    codes: tuple[LinearCodes, ...] = ()
    module: str = BLOCK

    def __post_init__(self) -> None:
        for names in (("ffn", "moe", "no_ffn"), ("attention", *RECURRENT)):
            if sum(getattr(self, name) is not None for name in names) != 1:
                raise InputError(f"a layer has one of {', '.join(map(repr, names))}")

    def config(self) -> LayerConfig:
        """Returns the layer as `ModelConfig` holds it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mlps = [one for name in ("ffn", "moe", "no_ffn") if (one := fields.pop(name)) is not None]
        recurrences = [one for name in RECURRENT if (one := fields.pop(name)) is not None]
        fields["attention"] = recurrences[0] if recurrences else fields["attention"]
        return LayerConfig(mlp=mlps[0], **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A pattern of layers and the number of its repeats."""

    repeats: int
    pattern: tuple[_Layer, ...]

    def __post_init__(self) -> None:
        check_positive(self, "repeats")
        if not self.pattern:
            raise InputError("a pattern needs at least one layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segments:
    segments: tuple[_Run, ...]


def _layer_to_json(layer: LayerConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(layer)
    mlp = fields.pop("mlp")
    if layer.module == BLOCK:
        del fields["module"]  # as in older files
    for name in ("branch_scales", "residual_scale", "output_scale", "codes"):
        if fields[name] == getattr(LayerConfig, name):
            del fields[name]  # likewise
    if layer.is_recurrent:
        kind = next(name for name, config in RECURRENT.items() if isinstance(layer.attention, config))
        fields = {kind if name == "attention" else name: value for name, value in fields.items()}
    for attention in filter(None, (fields.get("attention"), fields["cross"])):
        for name in _NEWER:
            if attention[name] == getattr(AttentionConfig, name):
                del attention[name]  # likewise
        if attention["latent"] is not None and attention["latent"]["indexer"] is None:
            del attention["latent"]["indexer"]
    if not isinstance(layer.mlp, MoEConfig):
        return fields | ({"no_ffn": {}} if isinstance(layer.mlp, NoFFNConfig) else {"ffn": mlp})
    for name in _NEWER_OF_MOE:
        if mlp[name] == getattr(MoEConfig, name):
            del mlp[name]
    return fields | {"moe": mlp | {"bank": layer.mlp.bank.to_json()}}


def _with_biases(segments: Any) -> Any:
    """Converts layers of older files, which say `qkv_bias` and `out_bias` instead of naming projections."""
    if isinstance(segments, list):
        return [_with_biases(item) for item in segments]
    if not isinstance(segments, Mapping):
        return segments
    fields = {key: _with_biases(value) if key in ("pattern", "attention") else value for key, value in segments.items()}
    flags = [fields[name] for name in ("qkv_bias", "out_bias") if name in fields]
    if flags and all(type(flag) is bool for flag in flags) and "biases" not in fields:
        biases = [*"qkv"] * bool(fields.pop("qkv_bias", False)) + ["o"] * bool(fields.pop("out_bias", False))
        fields["biases"] = biases
    return fields
