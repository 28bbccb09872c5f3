"""A language model, an image encoder, and a new projector between them: a model that sees, before it has learnt to."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.conversion.hf_config import usual_processing
from moe_jax.conversion.vision_formats.vision_format import without_final_norm
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import path_name
from moe_jax.files.json_toml import read_json_object
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import PREPROCESSOR
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.processing import read_processing
from moe_jax.model_io.loading import TOWER, leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig, VisionConfig
from moe_jax.nn.projector import make_projector

_PROJECTOR = "vision/projector/"


def config_with_eye(
    model: ModelSource,
    tower: ModelSource,
    *,
    features: Sequence[int],
    projector: Sequence[str],
    placeholder: int | None,
    processing: ImageProcessing | None = None,
) -> ModelConfig:
    """Returns the config of a language model that sees with an image encoder, in the form of LLaVA.

    Features are without those of a class token. Pictures are processed as the encoder's preprocessor_config.json says,
    or as is usual for its family.

    Raises:
      InputError: if the model sees already, the encoder is none, or parts do not fit each other.
    """
    config, seen = model.config, tower.config
    if config.vision is not None:
        raise InputError(f"{model.path} sees already, with {config.vision.tower.family!r}")
    config.check_no_encoder("a model that sees")
    if seen.patches is None:
        raise InputError(f"{tower.path} is a {seen.family!r} model, and not an image encoder")
    if processing is None:
        file = as_path(tower.path) / PREPROCESSOR
        processing = read_processing(read_json_object(file)) if file.is_file() else usual_processing(seen)
    vision = VisionConfig(
        family="llava",
        tower=without_final_norm(seen),
        processing=processing,
        features=tuple(features),
        drop_first=int(seen.patches.class_token),
        projector=tuple(projector),
        placeholder=placeholder,
    )
    return dataclasses.replace(config, vision=vision)


def leaves_with_eye(
    config: ModelConfig, model: ModelSource, tower: ModelSource, seed: int
) -> Iterator[Mapping[str, np.ndarray]]:
    """Yields the leaves of such a model, one after another: of both sources as they are stored, and the projector's."""
    drawn = _drawn_projector(config, seed)
    of_tower = {_in_eye(path): path for path in tower.specs()}
    for path in leaf_specs(config):
        if path.startswith(_PROJECTOR):
            yield {path: drawn[path]}
        elif path.startswith(TOWER):
            yield {path: tower.read(of_tower[path])}
        else:
            yield {path: model.read(path)}


def _in_eye(path: str) -> str:
    """Returns the path of an image encoder's leaf in a model that sees; its last norm stands aside there."""
    return TOWER + (path.replace("final_norm/", "pooled_norm/", 1) if path.startswith("final_norm/") else path)


def _drawn_projector(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    vision, dtype = config.check_sees("a projector"), jnp.dtype(config.dtype)
    steps: Any = nnx.List(make_projector(vision, config.d_model, rngs=nnx.Rngs(seed), dtype=dtype))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(steps))
    return {_PROJECTOR + path_name(path): np.asarray(leaf) for path, leaf in leaves}
