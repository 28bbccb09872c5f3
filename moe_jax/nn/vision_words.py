"""The eye of a model in words, for people."""

from moe_jax.models.config import ModelConfig
from moe_jax.nn.projector import tokens_per_picture


def vision_in_words(config: ModelConfig) -> str | None:
    """Returns tower, pictures and projector in a line; None: the model takes no pictures.

    >>> vision_in_words(moe_jax.tiny_model().config) is None
    True
    """
    vision = config.vision
    if vision is None:
        return None
    height, width = vision.processing.size
    features, tokens = ", ".join(map(str, vision.features)), tokens_per_picture(vision, config.d_model)
    return (
        f"{vision.family}: pictures of {height} x {width} pixels through {vision.tower.family}, "
        f"{vision.tower.num_layers} layers of width {vision.tower.d_model:,}, features {features}, and "
        f"{', '.join(vision.projector) or 'no projector'} become {tokens:,} tokens"
    )
