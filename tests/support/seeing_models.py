"""Small language models that see, made of their configs alone, and batches with pictures."""

import dataclasses
from typing import Any

import numpy as np

from moe_jax.experts.shapes import FFNConfig
from moe_jax.images.image_config import ImageProcessing, PatchesConfig
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, RopeConfig, VisionConfig
from moe_jax.nn.projector import tokens_per_picture

SIDE = 12
"""Of a picture, in pixels: 3 x 3 patches."""
FEATURES = 9
"""Tokens of a picture."""
BANKS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "low-rank": {"delta": "low-rank:2"},
    "sparse": {"delta": "sparse:0.9"},
}
"""Options of `upcycle` by how experts are stored."""


def tower_config(
    *, layers: int = 3, width: int = 16, heads: int = 2, hidden: int = 32, patch: int = 4, side: int = SIDE
) -> ModelConfig:
    """An image encoder in the form of CLIP's."""
    attention = AttentionConfig(
        num_heads=heads, num_kv_heads=heads, head_dim=width // heads, biases=("q", "k", "v", "o"), mask="bidirectional"
    )
    ffn = FFNConfig(dim=hidden, gated=False, activation="quick_gelu", bias=True)
    grid = (side // patch, side // patch)
    patches = PatchesConfig(size=patch, grid=grid, class_token=True, pre_norm=True, pooled_norm=True)
    return ModelConfig(
        family="clip_vision_model", vocab_size=0, d_model=width, max_positions=patches.num_positions,
        layers=(LayerConfig(attention=attention, mlp=ffn),) * layers, rope=RopeConfig(fraction=0.0), norm="layer",
        final_norm=False, patches=patches,
    )  # fmt: skip


def clip_large(**options: Any) -> VisionConfig:
    """LLaVA's eye over CLIP-L/14 of 336 pixels, at its true size."""
    tower = tower_config(layers=24, width=1024, heads=16, hidden=4096, patch=14, side=336)
    processing = ImageProcessing(size=(336, 336), shortest=336, mean=(0.5, 0.45, 0.4), std=(0.25, 0.26, 0.27))
    return VisionConfig(family="llava", tower=tower, processing=processing, **options)


def vision_config(**options: Any) -> VisionConfig:
    """LLaVA's eye over such a tower."""
    processing = ImageProcessing(size=(SIDE, SIDE), shortest=SIDE, mean=(0.5, 0.45, 0.4), std=(0.25, 0.26, 0.27))
    return VisionConfig(**{"family": "llava", "tower": tower_config(), "processing": processing, **options})


def seeing(config: ModelConfig, **options: Any) -> ModelConfig:
    """A language model with that eye."""
    return dataclasses.replace(config, vision=vision_config(**options))


def pictures(rows: int, count: int, *, seed: int = 0) -> np.ndarray:
    """Random pixels of `count` pictures for every row."""
    return np.random.default_rng(seed).integers(0, 256, (rows, count, SIDE, SIDE, 3), np.uint8)


def slots_of(config: ModelConfig, length: int, *places: tuple[int, ...]) -> np.ndarray:
    """Slots of rows of `length` tokens: of every row the places where its pictures begin, in turn."""
    assert config.vision is not None
    count = tokens_per_picture(config.vision, config.d_model)
    slots = np.zeros((len(places), length), np.int32)
    for row, starts in enumerate(places):
        for picture, start in enumerate(starts):
            slots[row, start : start + count] = np.arange(count) + picture * count + 1
    return slots


def picture_batch(config: ModelConfig, length: int, *places: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    """A batch to train on, with pictures at the places; targets are the next tokens, and features are not scored."""
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (len(places), length + 1), np.int32)
    slots = slots_of(config, length, *places)
    weights = (np.pad(slots, ((0, 0), (0, 1)))[:, 1:] == 0).astype(np.float32)
    pixels = pictures(len(places), max(1, *map(len, places)), seed=seed)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights, "pixels": pixels, "slots": slots}
