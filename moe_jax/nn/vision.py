"""An image encoder: patches of pictures as tokens, and a stack of layers over them."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError
from moe_jax.experts.linear import Linear
from moe_jax.experts.shapes import normal_kernel
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.images.patches import interpolated_positions, patches_of
from moe_jax.models.config import ModelConfig
from moe_jax.models.vision_config import PatchesConfig, VisionConfig
from moe_jax.nn.inputs import as_array
from moe_jax.nn.layers import Norm
from moe_jax.nn.stack import Stack, StackOutput


class Patches(nnx.Module):
    """Pictures to the tokens of a tower: a linear map of every patch, positions, perhaps a class token before them."""

    def __init__(self, config: PatchesConfig, tower: ModelConfig, *, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(tower.dtype), tower.d_model
        self.config = config
        inputs = config.channels * config.size**2
        self.projection = Linear((inputs, width), bias=config.bias, rngs=rngs, dtype=dtype)
        self.positions = nnx.Param(normal_kernel(rngs, (config.num_positions, width), dtype))
        if config.class_token:
            self.class_token = nnx.Param(normal_kernel(rngs, (width,), dtype))
        self.norm = Norm(tower.norm if config.pre_norm else "none", width, tower.norm_eps, dtype=dtype)

    def __call__(self, pixels: Float[Array, "B H W C"]) -> Float[Array, "B T d"]:
        """Returns the tokens; raises `InputError` for pictures that are smaller than a patch."""
        grid = (pixels.shape[1] // self.config.size, pixels.shape[2] // self.config.size)
        if 0 in grid:
            size, patch = f"{pixels.shape[1]} x {pixels.shape[2]}", f"{self.config.size} x {self.config.size}"
            raise InputError(f"pictures of {size} pixels are smaller than a patch of {patch}")
        x = self.projection(patches_of(pixels, self.config.size))
        positions, first = self.positions[...], int(self.config.class_token)
        of_patches = interpolated_positions(positions[first:], self.config.grid, grid)
        x = x + of_patches.astype(x.dtype)
        if self.config.class_token:
            token = (self.class_token[...] + positions[0]).astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, x.shape[-1])), x], axis=1)
        return self.norm(x)


class VisionTower(Summarised):
    """An image encoder.

    Attributes:
      config: the description that it was built from.
      compute_dtype: dtype of the activations.
    """

    def __init__(
        self, config: VisionConfig, *, rngs: nnx.Rngs, remat: str = "none", compute_dtype: DTypeLike = jnp.float32
    ):
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.patches = Patches(config.patches, config.tower, rngs=rngs)
        self.stack = Stack(config.tower, rngs=rngs, remat=remat)
        tower = config.tower
        kind = tower.norm if config.pooled_norm else "none"
        self.pooled_norm = Norm(kind, tower.d_model, tower.norm_eps, dtype=jnp.dtype(tower.dtype))

    def _summary(self) -> list[str]:
        return [f"tower of {len(self.stack.layers)} layers, {size_of(self)}"]

    def __call__(self, pixels: Float[Array, "B H W C"], *, hidden_states: Sequence[int] = ()) -> StackOutput:
        """Encodes pictures.

        Args:
          pixels: normalised, in the order of rows, columns, channels.
          hidden_states: layers whose inputs to return, as `Stack` numbers them.

        Returns:
          As `Stack` does: `x` are the features after the last layer, of the class token first where there is one.

        Raises:
          InputError: for arrays of another shape or dtype, and pictures that are smaller than a patch.
        """
        pixels = as_array("pixels", pixels, "floating-point numbers", (None, None, None, self.config.patches.channels))
        return self.stack(self.patches(pixels.astype(self.compute_dtype)), hidden_states=hidden_states)
