"""The image encoder of a model apart from it: where it is not trained, it looks at every picture once."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, UInt8

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, path_name
from moe_jax.files.byte_files import fingerprint_leaves
from moe_jax.images.feature_cache import DIGEST_BYTES, FeatureCache
from moe_jax.images.image_config import ImageProcessing
from moe_jax.model_io.loading import TOWER, abstract_model, layer_of, load_vision, vision_paths
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.models.serialize import config_to_json
from moe_jax.nn.projector import shape_of_features
from moe_jax.nn.vision import Vision

# Another number, where the same weights give other features than before.
_VERSION = 1

# Arrays of a batch that features take the place of.
_OF_PIXELS = ("pixels", "digests", "known")

Picture = tuple[bytes, UInt8[np.ndarray, "H W 3"]]
"""The SHA-256 of a picture's file, and its pixels."""


GROUP = 8
"""Number of pictures that the tower looks at together."""


class FrozenTower:
    """Features of pictures, on one local device, from a cache where they are there.

    A program takes a fixed number of pictures, and what it makes of one does not depend on the others: a picture has
    the same features to the bit, whatever is beside it. With several processes, each looks at the pictures of its own
    rows, and waits for none.

    Attributes:
      fingerprint: of all that features depend on beside pixels.
      computed, found: numbers of pictures that the tower looked at, and that were in the cache.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        param_dtype: str | None = None,
        compute_dtype: str = "float32",
        group: int = GROUP,
        device: Any = None,
    ):
        """Reads the eye of a model, and compiles nothing yet.

        Args:
          source: a model that sees.
          param_dtype, compute_dtype: as in training (`model.frozen_dtype`, `model.compute_dtype`).
          group: number of pictures in a program.
          device: a local one; None: the first.

        Raises:
          InputError: as `load_vision`.
        """
        self.config = source.config.check_sees("pictures")
        self.computed, self.found = 0, 0
        self._device = jax.local_devices()[0] if device is None else device
        # Of its own, for training has set that of all devices.
        self._mesh = make_mesh({}, [self._device])
        vision = load_vision(source, param_dtype=param_dtype, compute_dtype=compute_dtype, mesh=self._mesh)
        self.dtype, self._group = jnp.dtype(compute_dtype), group
        self.fingerprint = tower_fingerprint(source.config, vision, platform=self._device.platform)
        self._state, self._program = _program_of(vision)
        self._cache: FeatureCache | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Number and width of the features of a picture."""
        return shape_of_features(self.config)

    def is_of(self, other: ModelSource) -> bool:
        """Returns whether another model's own tower gives these features, if it is read in the dtypes of this one.

        How pictures become pixels is not compared. Raises `InputError` as `load_vision`.
        """
        ours = self.config.tower
        dtypes = {path_name(path): str(leaf.dtype) for path, leaf in jax.tree_util.tree_leaves_with_path(self._state)}
        how = {"compute_dtype": str(self.dtype), "mesh": self._mesh}
        vision = load_vision(other, param_dtype=lambda path: dtypes.get(path), **how)
        tower = dataclasses.replace(vision.config.tower, dtype=ours.dtype)
        vision.config = dataclasses.replace(vision.config, tower=tower)
        return tower_fingerprint(other.config, vision, platform=self._device.platform) == self.fingerprint

    def keep_in(
        self,
        folder: Path,
        *,
        max_bytes: int,
        processing: ImageProcessing | None = None,
        note: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Keeps features in a folder, where they are looked for first.

        Arguments are as in `FeatureCache`; without `processing`, pixels are made as the model's config says.
        """
        self._cache = FeatureCache(
            folder,
            fingerprint=self.fingerprint,
            processing=self.config.processing if processing is None else processing,
            shape=self.shape,
            dtype=self.dtype,
            max_bytes=max_bytes,
            note=note,
        )

    def find(self, digest: bytes) -> Float[np.ndarray, "n w"] | None:
        """Returns the features of a picture that are kept, by the SHA-256 of its file; None: there are none."""
        found = None if self._cache is None else self._cache.find(digest)
        self.found += found is not None
        return found

    def features_of(self, pictures: Sequence[Picture]) -> list[Float[np.ndarray, "n w"]]:
        """Returns the features of pictures, in the dtype of activations; a picture that comes twice is seen once."""
        of_digest: dict[bytes, np.ndarray] = {}
        new: dict[bytes, np.ndarray] = {}
        for digest, pixels in pictures:
            if digest in of_digest or digest in new:
                continue
            found = self.find(digest)
            if found is None:
                new[digest] = pixels
            else:
                of_digest[digest] = found
        self.computed += len(new)
        for digest, features in zip(new, self._seen(list(new.values())), strict=True):
            of_digest[digest] = features
            if self._cache is not None:
                self._cache.keep(digest, features)
        return [of_digest[digest] for digest, _ in pictures]

    def fill(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns a batch with `features` [B, M, n, w] in place of its `pixels` [B, M, H, W, 3]; one without stays.

        Args:
          batch: of rows on this host. Beside pixels it has `digests` UInt8[B, M, 32], each as `digest_of` returns it;
            zeros: there is no picture, and its features are 0. Where it has `known` Bool[B, M], its `features` are
            those already, and their pixels do not count. Other arrays stay.

        Raises:
          InputError: for digests that do not belong to the pixels.
        """
        if "pixels" not in batch:
            return dict(batch)
        pixels, digests = batch["pixels"], batch["digests"]
        if digests.dtype != np.uint8 or digests.shape != (*pixels.shape[:2], DIGEST_BYTES):
            raise InputError(
                f"digests of pictures are {digests.dtype}{list(digests.shape)}; expected uint8"
                f"{[*pixels.shape[:2], DIGEST_BYTES]}, a SHA-256 for each of the pixels {list(pixels.shape)}"
            )
        wanted = digests.any(axis=-1)
        features = np.zeros((*pixels.shape[:2], *self.shape), self.dtype)
        if "known" in batch:
            features[batch["known"]] = batch["features"][batch["known"]]
            wanted &= ~batch["known"]
        there = np.argwhere(wanted)
        seen = self.features_of([(digests[row, place].tobytes(), pixels[row, place]) for row, place in there])
        for (row, place), one in zip(there, seen, strict=True):
            features[row, place] = one
        return {name: array for name, array in batch.items() if name not in _OF_PIXELS} | {"features": features}

    def _seen(self, pixels: list[UInt8[np.ndarray, "H W 3"]]) -> list[Float[np.ndarray, "n w"]]:
        made = []
        with jax.set_mesh(self._mesh):
            for start in range(0, len(pixels), self._group):
                group = np.stack(pixels[start : start + self._group])
                missing = self._group - len(group)
                padded = np.pad(group, ((0, missing), *[(0, 0)] * 3))
                # The device works on this group while the next one is stacked.
                made.append((len(group), self._program(self._state, jax.device_put(padded, self._device))))
        return [features for count, group in made for features in np.asarray(group)[:count]]


def _program_of(vision: Vision) -> tuple[nnx.State, Any]:
    """Returns the parameters of an eye without its projector, and the compiled function of these and of pixels."""
    vision.projector = nnx.List([])
    graphdef, state = nnx.split(vision)
    return state, jax.jit(lambda state, pixels: nnx.merge(graphdef, state).features(pixels[:, None])[:, 0])


def bytes_of_frozen_tower(config: ModelConfig, *, param_dtype: str | None, compute_dtype: str, device: Any) -> int:
    """Returns the bytes that a `FrozenTower` takes on a device: its parameters, and what its program needs meanwhile.

    Nothing is read; the program is compiled.
    """
    size = config.check_sees("pictures").processing.size
    state, program = _program_of(abstract_model(config, compute_dtype=compute_dtype).vision)
    place, dtype = SingleDeviceSharding(device), jnp.dtype(param_dtype or config.check_sees("pictures").tower.dtype)

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place)

    state = jax.tree.map(placed, state)
    pixels = jax.ShapeDtypeStruct((GROUP, *size, 3), jnp.uint8, sharding=place)
    needed = program.lower(state, pixels).compile().memory_analysis()
    return needed.argument_size_in_bytes + needed.temp_size_in_bytes + needed.output_size_in_bytes


def tower_fingerprint(config: ModelConfig, vision: Vision, *, platform: str) -> str:
    """Returns a SHA-256 of all that features depend on beside pixels, on this platform.

    It is of every byte of the weights, in their dtypes in memory, of all layers that are run; of the config of the
    tower, and of which of its hidden states are taken; and of the dtype of activations.

    Args:
      config: of the whole model.
      vision: its eye.
      platform: of the device, whose products are rounded in its own way.
    """
    leaves = _leaves_that_count(config, vision)
    specs = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    weights = fingerprint_leaves(specs, lambda name: np.ascontiguousarray(leaves[name]).tobytes())
    of_vision = vision.config
    described = {
        "version": _VERSION,
        "weights": weights,
        "tower": config_to_json(dataclasses.replace(of_vision.tower, foreign={})),
        "features": of_vision.hidden_states,
        "drop_first": of_vision.drop_first,
        "compute_dtype": str(vision.tower.compute_dtype),
        "platform": platform,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _leaves_that_count(config: ModelConfig, vision: Vision) -> dict[str, Array | np.ndarray]:
    """Returns the leaves that features depend on, by their paths on disk: none behind the last that is taken."""
    last, found = max(vision.config.hidden_states), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(vision)):
        names = vision_paths(config, path_name(path))
        for index, name in enumerate(names):
            layer = name.removeprefix(f"{TOWER}layers/").split("/")[0]
            is_layer, is_last = layer.isdecimal(), last == vision.config.tower.num_layers
            counts = int(layer) < last if is_layer else "/patches/" in name or "/final_norm/" in name and is_last
            if name.startswith(TOWER) and counts:
                found[name] = layer_of(leaf, index if is_layer else None)
    return found
