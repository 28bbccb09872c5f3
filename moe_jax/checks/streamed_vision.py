"""The eye of a model run one layer after another, as `StreamedModel` runs the others."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.checks.streamed_layers import Read, Specs, apply_final_norm, apply_layer, module_with_leaves
from moe_jax.images.normalization import normalized
from moe_jax.models import LayerConfig, ModelConfig, VisionConfig
from moe_jax.nn.projector import make_projector
from moe_jax.nn.vision import Patches, joined_features, splice

_TOWER, _PROJECTOR = "vision/tower/", "vision/projector/"

Program = Callable[[Any, Callable[[], jax.stages.Lowered]], jax.stages.Compiled]
"""`(key, lower)` compiles what `lower` gives, unless there is a program of this key."""


class Pictures(NamedTuple):
    """Pictures of the first R rows of a batch, and the tokens that they take the place of, as in `Decoder`."""

    pixels: UInt8[np.ndarray, "R M H W 3"]
    slots: Int[np.ndarray, "R T"]


class StreamedVision:
    """Splices the features of some pictures into activations, without the tower ever being in memory as a whole."""

    def __init__(self, config: ModelConfig, specs: Specs, pictures: Pictures, program: Program):
        """Compiles every distinct layer of the tower that is run; no weights are needed."""
        vision = config.check_sees("pictures")
        self._config, self._pictures = vision, pictures
        tower, stop = vision.tower, max(vision.hidden_states)

        def below(prefix: str) -> dict[str, jax.ShapeDtypeStruct]:
            return {path: spec for path, spec in specs.items() if path.startswith(prefix)}

        first, last, norm = below(f"{_TOWER}patches/"), below(_PROJECTOR), below(f"{_TOWER}final_norm/")
        self._first_leaves, self._last_leaves, self._norm_leaves = list(first), list(last), list(norm)
        pixels = pictures.pixels.reshape(-1, *pictures.pixels.shape[2:])
        enter, leave = jax.jit(partial(embed_patches, vision)), jax.jit(partial(project_features, config))
        self._enter = program("patches", lambda: enter.lower(first, pixels))
        x = jax.eval_shape(partial(embed_patches, vision), first, pixels)
        self._layers = []
        for index in range(min(stop, tower.num_layers)):
            prefix = f"{_TOWER}layers/{index}/"
            paths = {path.removeprefix(prefix): path for path in below(prefix)}
            self._layers.append((paths, self._layer(tower.layers[index], paths, specs, x, program)))
        self._norm = None
        if stop == tower.num_layers:
            apply = jax.jit(partial(apply_final_norm, tower, where=f"{_TOWER}final_norm/"))
            self._norm = program("norm of the tower", lambda: apply.lower(norm, x))
        self._leave = program("projector", lambda: leave.lower(last, [x] * len(vision.features)))

    def _layer(
        self, layer: LayerConfig, paths: Mapping[str, str], specs: Specs, x: jax.ShapeDtypeStruct, program: Program
    ) -> jax.stages.Compiled:
        stored = {name: specs[path] for name, path in paths.items()}
        key = ("tower", layer, tuple((name, spec.dtype) for name, spec in sorted(stored.items())))
        apply = partial(apply_layer, self._config.tower, layer, source=None, watch=lambda block: [])
        return program(key, lambda: jax.jit(lambda leaves, x: apply(leaves, x)[0]).lower(stored, x))

    def __call__(self, x: Float[Array, "B T d"], read: Read) -> Float[Array, "B T d"]:
        """Returns activations of tokens before the first layer, with the features where the slots say so."""
        pixels, slots = self._pictures
        states = {0: self._enter(_read(read, self._first_leaves), pixels.reshape(-1, *pixels.shape[2:]))}
        for index, (paths, program) in enumerate(self._layers):
            leaves = {name: read(path) for name, path in paths.items()}
            states[index + 1] = program(leaves, states[index])
            states[index + 1].block_until_ready()
            if index not in self._config.hidden_states:
                del states[index]
        if self._norm is not None:
            states[len(self._layers)] = self._norm(_read(read, self._norm_leaves), states[len(self._layers)])
        features = self._leave(_read(read, self._last_leaves), [states[index] for index in self._config.hidden_states])
        rows = len(slots)
        seen = splice(x[:rows], features.reshape(rows, -1, features.shape[-1]), jnp.asarray(slots))
        return jnp.concatenate([seen, x[rows:]])


def _read(read: Read, paths: list[str]) -> dict[str, np.ndarray]:
    return {path: read(path) for path in paths}


def embed_patches(
    config: VisionConfig, leaves: Mapping[str, Array], pixels: UInt8[Array, "N H W 3"]
) -> Float[Array, "N T w"]:
    """Returns the activations of pictures before the first layer of the tower; `leaves` by their paths."""
    tower, patches = config.tower, config.tower.patches
    assert patches is not None
    module: Any = module_with_leaves(lambda rngs: Patches(patches, tower, rngs=rngs), leaves, f"{_TOWER}patches/")
    return module(normalized(pixels, config.processing))


def project_features(
    config: ModelConfig, leaves: Mapping[str, Array], hidden_states: list[Float[Array, "N T w"]]
) -> Float[Array, "N n d"]:
    """Returns what the projector makes of the hidden states that are taken, in their order."""
    vision, dtype = config.check_sees("pictures"), jnp.dtype(config.dtype)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.List(make_projector(vision, config.d_model, rngs=rngs, dtype=dtype))

    x = joined_features(vision, hidden_states)
    for step in module_with_leaves(make, leaves, _PROJECTOR):  # type: ignore[attr-defined]
        x = step(x)
    return x
