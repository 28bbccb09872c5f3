"""Shared by formats of models that see whose language model and tower have configs of their own."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.usual import ACTIVATIONS
from moe_jax.conversion.vision_formats.vision_format import Parts
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig, VisionConfig

ACTIVATION_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Names of Transformers for ours, of which it has several."""


def read_parts(keys: HFConfig, parts: Parts) -> tuple[ModelConfig, ModelConfig]:
    """Returns the configs of a language model and of a tower, each under a key of its own.

    Raises:
      InputError: if they are not there, or are something else.
    """
    keys.require("text_config", "vision_config")
    for name in ("text_config", "vision_config"):
        keys.mapping(name)
    text, tower = parts.model("text_config"), parts.model("vision_config")
    text.check_no_tower("the language model of one that sees (text_config)")
    if tower.patches is None:
        raise InputError(f"config.json: vision_config is of a {tower.family!r} model, expected an image encoder")
    return text, tower


def read_activation(keys: HFConfig) -> str:
    """Takes the activation of a projector; raises `InputError` if it is not known."""
    activation = keys.text("projector_hidden_act")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise InputError(f"config.json: unknown projector_hidden_act {shown(activation)}; known: {known}")
    return ACTIVATIONS[activation]


def with_tie(data: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    """Returns the keys of a config.json, which leaves out whether the head is the embedding, with what tensors say."""
    if "tie_word_embeddings" in data or not tensors:
        return data
    return {**data, "tie_word_embeddings": not any(name.endswith("lm_head.weight") for name in tensors)}


def with_head(text: ModelConfig, vision: VisionConfig, *, tied: bool) -> ModelConfig:
    """Returns a language model that sees, whose head is that of its format.

    A bias, a cap and a factor that the head of the language model alone may have it has not.
    """
    return dataclasses.replace(
        text, vision=vision, tie_embeddings=tied, head_bias=False, logit_soft_cap=None, logit_scale=1.0
    )


def pixel_shuffle(vision: VisionConfig, format_name: str) -> tuple[int, tuple[str, ...]]:
    """Returns the side of the squares that the first step of a projector joins, and the other steps.

    Raises:
      InputError: if the first step is another one.
    """
    first, *rest = vision.projector or ("",)
    name, _, side = first.partition(":")
    if name != "pixel_shuffle" or not side.isdecimal():
        raise InputError(
            f"the format of {format_name!r} has a projector that begins with pixel_shuffle, and this model has "
            f"{', '.join(vision.projector) or 'none'}"
        )
    return int(side), tuple(rest)
