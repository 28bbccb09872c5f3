"""The eye of a model: patches of pictures as tokens, layers over them, and steps to the model's width."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.core.errors import InputError
from moe_jax.experts.linear import Linear
from moe_jax.experts.shapes import normal_kernel
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.images.image_config import PatchesConfig
from moe_jax.images.normalization import normalized
from moe_jax.images.patches import interpolated_positions, patches_of
from moe_jax.models.config import ModelConfig, VisionConfig
from moe_jax.nn.inputs import as_array, check_range
from moe_jax.nn.layers import Norm
from moe_jax.nn.projector import make_projector, shape_of_features
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
        grid = self.config.grid_of((pixels.shape[1], pixels.shape[2]))
        if 0 in grid:
            size, patch = f"{pixels.shape[1]} x {pixels.shape[2]}", f"{self.config.size} x {self.config.size}"
            raise InputError(f"pictures of {size} pixels are smaller than a patch of {patch}")
        x = self.projection(patches_of(pixels, self.config.size))
        # Not by slices of a parameter: JAX 0.10 cannot add their gradients to sums in place (training.step).
        of_token, of_patches = jnp.split(self.positions[...], [int(self.config.class_token)])
        x = x + interpolated_positions(of_patches, self.config.grid, grid).astype(x.dtype)[None]
        if self.config.class_token:
            token = (self.class_token[...][None, None] + of_token[None]).astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, x.shape[-1])), x], axis=1)
        return self.norm(x)


class VisionTower(Summarised):
    """An image encoder.

    Attributes:
      config: the description that it was built from, whose `patches` are not None.
      compute_dtype: dtype of the activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        remat: str = "none",
        compute_dtype: DTypeLike = jnp.float32,
        cuts: Collection[int] = (),
    ):
        """Draws the parameters; `remat` and `cuts` as in `Stack`."""
        assert config.patches is not None, "an image encoder has patches"
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.patches = Patches(config.patches, config, rngs=rngs)
        self.stack = Stack(config, rngs=rngs, remat=remat, cuts=cuts)
        kind = config.norm if config.patches.pooled_norm else "none"
        self.pooled_norm = Norm(kind, config.d_model, config.norm_eps, dtype=jnp.dtype(config.dtype))

    def _summary(self) -> list[str]:
        return [f"{self.config.family}, tower of {len(self.stack.layers)} layers, {size_of(self)}"]

    def __call__(
        self, pixels: Float[Array, "B H W C"], *, hidden_states: Sequence[int] = (), stop: int | None = None
    ) -> StackOutput:
        """Encodes pictures.

        Args:
          pixels: normalised, in the order of rows, columns, channels.
          hidden_states: layers whose inputs to return, as `Stack` numbers them.
          stop: the layer before which to stop, as in `Stack`.

        Returns:
          As `Stack` does: `x` are the features after the last layer, of the class token first where there is one.

        Raises:
          InputError: for arrays of another shape or dtype, and pictures that are smaller than a patch.
        """
        channels = self.patches.config.channels
        pixels = as_array("pixels", pixels, "floating-point numbers", (None, None, None, channels))
        return self.stack(self.patches(pixels.astype(self.compute_dtype)), hidden_states=hidden_states, stop=stop)


class Vision(Summarised):
    """The eye of a language model: a tower, and a projector of its features.

    Attributes:
      config: the description that it was built from.
      tower: the image encoder.
      projector: the modules of its steps, in turn.
    """

    def __init__(
        self,
        config: VisionConfig,
        d_model: int,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        remat: str = "none",
        compute_dtype: DTypeLike = jnp.float32,
    ):
        """Draws the parameters; the projector's have a `dtype`, the tower's that of its own config."""
        self.config = config
        # Layers behind the last that is looked at are not run, and of the others no more is kept than is taken.
        cuts = config.hidden_states
        self.tower = VisionTower(config.tower, rngs=rngs, remat=remat, compute_dtype=compute_dtype, cuts=cuts)
        self.projector: Any = nnx.List(make_projector(config, d_model, rngs=rngs, dtype=dtype))

    def _summary(self) -> list[str]:
        steps = ", ".join(self.config.projector)
        return [f"{size_of(self)}", repr(self.tower), f"projector: {steps}"]

    def features(self, pixels: UInt8[Array, "B M H W 3"]) -> Float[Array, "B M n w"]:
        """Returns the tower's features of pictures, before the projector.

        Raises:
          InputError: for pixels of another shape, or that are not uint8.
        """
        height, width = self.config.processing.size
        pixels = as_array("pixels", pixels, "bytes", (None, None, height, width, 3))
        batch, count = pixels.shape[:2]
        last = max(self.config.hidden_states)
        stop = None if last == self.config.tower.num_layers else last
        x = features_of(self.config, self.tower, pixels.reshape(batch * count, height, width, 3), stop=stop)
        return x.reshape(batch, count, *x.shape[1:])

    def __call__(self, pixels: UInt8[Array, "B M H W 3"]) -> Float[Array, "B n d"]:
        """Returns what the language model gets of every row's pictures, one after another, to be spliced by `splice`.

        Raises:
          InputError: as `features`.
        """
        return self.project(self.features(pixels))

    def project(self, features: Float[Array, "B M n w"]) -> Float[Array, "B m d"]:
        """Returns the same of what `features` returns; of another dtype, it is first cast to that of activations.

        Raises:
          InputError: for features of another shape, or that are no floating-point numbers.
        """
        wanted = (None, None, *shape_of_features(self.config))
        x = jnp.asarray(as_array("features", features, "floating-point numbers", wanted), self.tower.compute_dtype)
        batch, count = x.shape[:2]
        x = x.reshape(batch * count, *x.shape[2:])
        for step in self.projector:
            x = step(x)
        return x.reshape(batch, -1, x.shape[-1])


def features_of(
    config: VisionConfig, tower: VisionTower, pixels: UInt8[Array, "B H W 3"], *, stop: int | None = None
) -> Float[Array, "B n w"]:
    """Returns the features of pictures, before the projector; `stop` as in `VisionTower`."""
    seen = tower(
        normalized(pixels, config.processing), hidden_states=tuple(sorted(set(config.hidden_states))), stop=stop
    )
    return joined_features(config, [seen.hidden_states[index] for index in config.hidden_states])


def joined_features(config: VisionConfig, hidden_states: Sequence[Float[Array, "B T w"]]) -> Float[Array, "B n W"]:
    """Returns the features of pictures, of the hidden states that are taken, in their order."""
    return jnp.concatenate(hidden_states, axis=-1)[:, config.drop_first :]


def splice(
    x: Float[Array, "B T d"], features: Float[Array, "B n d"], slots: Int[Array, "B T"]
) -> Float[Array, "B T d"]:
    """Puts features of pictures where slots say so: 0 leaves the token, k takes the row's k-th feature.

    Raises:
      InputError: for slots of another shape, or that name features which are not there.
    """
    slots = as_array("slots", slots, "integers", x.shape[:2])
    check_range("slots", slots, features.shape[1] + 1, "features of a row's pictures, counted from 1, or 0 for a token")
    slots = jnp.asarray(slots)
    found = jnp.take_along_axis(features.astype(x.dtype), jnp.maximum(slots - 1, 0)[:, :, None], axis=1)
    return jnp.where((slots > 0)[:, :, None], found, x)
