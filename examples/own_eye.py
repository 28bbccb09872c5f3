"""A language model gets an eye: an image encoder and a projector, of which the projector and the model are trained.

    python examples/own_eye.py

Pictures are of one colour, and the text says which; the tower's weights are random, which is enough for colours.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from moe_jax.configs import (
    AttentionConfig,
    FFNConfig,
    ImageProcessing,
    LayerConfig,
    ModelConfig,
    PatchesConfig,
    RopeConfig,
    VisionConfig,
)
from moe_jax.nn import place_pictures, tokens_per_picture

SIDE, PLACEHOLDER, ASKED = 16, 63, 62
COLOURS = np.array([[220, 40, 40], [40, 220, 40], [40, 40, 220], [220, 220, 40]], np.uint8)


def eye() -> VisionConfig:
    """An image encoder of two layers over 16 patches, every four of which become one token."""
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, mask="bidirectional")
    layer = LayerConfig(attention=attention, mlp=FFNConfig(dim=32, gated=False, activation="gelu_tanh", bias=True))
    tower = ModelConfig(
        family="siglip_vision_model",
        vocab_size=0,
        d_model=16,
        max_positions=16,
        layers=(layer,) * 2,
        rope=RopeConfig(fraction=0.0),
        norm="layer",
        patches=PatchesConfig(size=4, grid=(4, 4), bias=True),
    )
    return VisionConfig(
        family="llava",
        tower=tower,
        processing=ImageProcessing(size=(SIDE, SIDE), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
        features=(-1,),
        drop_first=0,
        projector=("pixel_shuffle:2", "linear", "gelu", "linear"),
        placeholder=PLACEHOLDER,
    )


def batch(config: ModelConfig, rows: int, seed: int) -> dict[str, np.ndarray]:
    """Rows of a picture, a question and its answer, which alone is scored: the number of the colour."""
    assert config.vision is not None
    colours = np.random.default_rng(seed).integers(0, len(COLOURS), rows)
    noise = np.random.default_rng(seed + 1).integers(0, 30, (rows, 1, SIDE, SIDE, 3), np.uint8)
    each = tokens_per_picture(config.vision, config.d_model)
    placed = place_pictures([[PLACEHOLDER, ASKED]] * rows, rows, placeholder=PLACEHOLDER, per_picture=each)
    tokens, slots = (np.array([getattr(row, name) for row in placed], np.int32) for name in ("ids", "slots"))
    targets = np.concatenate([tokens[:, 1:], colours[:, None].astype(np.int32)], axis=1)
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, -1] = 1
    pixels = COLOURS[colours][:, None, None, None] + noise
    return {"tokens": tokens, "targets": targets, "weights": weights, "pixels": pixels, "slots": slots}


def right(model: moe_jax.Model, given: dict[str, np.ndarray]) -> float:
    """The share of the answers that are right."""
    inputs = {name: jnp.asarray(given[name]) for name in ("tokens", "pixels", "slots")}
    logits = jax.jit(lambda decoder, given: decoder(**given).logits)(model.decoder, inputs)
    return float(np.mean(np.argmax(logits[:, -1], axis=-1) == given["targets"][:, -1]))


def main() -> tuple[float, float, float]:
    """Returns the share of right answers before training, after it, and with each other's pictures."""
    config = dataclasses.replace(moe_jax.tiny_model().config, vision=eye())
    model = moe_jax.Model(moe_jax.Decoder(config, rngs=nnx.Rngs(0)))
    unseen = batch(config, 64, seed=1000)
    recipe = {
        "train": {"steps": 60},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup_steps": 5, "steps": 60},
    }
    trained = moe_jax.train(recipe, model, (batch(config, 16, seed=2 * step) for step in range(60)))
    others = unseen | {"pixels": np.roll(unseen["pixels"], 1, axis=0)}
    before, after, without = right(model, unseen), right(trained, unseen), right(trained, others)
    print(
        f"right answers: {before:.0%} before training, {after:.0%} after it, {without:.0%} with each other's pictures"
    )
    return before, after, without


if __name__ == "__main__":
    main()
