"""The image encoder of SmolVLM: SigLIP's, without its head."""

import dataclasses
from typing import Any

import numpy as np

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.towers import SIGLIP
from moe_jax.conversion.families.usual_tower import HALF, read_tower, squashed, tower_ffn
from moe_jax.core.errors import InputError
from moe_jax.models import ModelConfig


def _read(keys: HFConfig) -> ModelConfig:
    tower = read_tower(keys, "smolvlm_vision", tower_ffn(keys), bias=True)
    assert tower.patches is not None
    side, _ = tower.patches.grid
    if not _takes_own_positions(side):
        raise InputError(
            f"config.json: of {side} x {side} patches, Transformers gives some the positions of their neighbours, as "
            "it looks for them with rounded fractions of a side; not supported"
        )
    return tower


def _takes_own_positions(side: int) -> bool:
    """Whether the code of Transformers gives the n-th patch of a side the n-th position, in float32."""
    edges = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    places = np.minimum(np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side)), np.float32(1 - 1e-6))
    return bool((np.searchsorted(edges, places, side="right") == np.arange(side)).all())


def _write(config: ModelConfig) -> dict[str, Any]:
    return {key: value for key, value in SIGLIP.write(config).items() if key != "vision_use_head"}


SMOLVLM_VISION = dataclasses.replace(
    SIGLIP,
    name="smolvlm_vision",
    architecture="SmolVLMVisionTransformer",
    defaults={**SIGLIP.defaults, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
    read=_read,
    write=_write,
    harmless=(),
    optional_prefix="",
    within=None,
    processing=lambda side: squashed(side, HALF, HALF, resample="lanczos"),
)
