"""Bytes of pixels to the numbers that a tower takes, on the device: they travel in a quarter of the bytes."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from moe_jax.images.image_config import ImageProcessing


def normalized(pixels: UInt8[Array, "*n S S 3"], processing: ImageProcessing) -> Float[Array, "*n S S 3"]:
    """Rescales and normalises pixels, in float32."""
    rescaled = pixels.astype(jnp.float32) * jnp.float32(processing.rescale)
    by_channel = (1,) * (pixels.ndim - 1) + (3,)
    mean, std = (jnp.asarray(each, jnp.float32).reshape(by_channel) for each in (processing.mean, processing.std))
    return (rescaled - mean) / std
