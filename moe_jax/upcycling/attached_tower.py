"""Gives a language model an eye: an image encoder as it is, and a projector that is drawn."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from moe_jax.conversion.hf_config import usual_processing
from moe_jax.conversion.vision_formats.vision_format import without_final_norm
from moe_jax.core.errors import InputError, shown
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.sharding import path_name
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.processing import read_processing
from moe_jax.model_io.in_memory import Destination, open_writer, write_each
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import TOWER, leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig, VisionConfig
from moe_jax.models.linear_codes import EMBEDDING
from moe_jax.nn.projector import make_projector, tokens_per_picture
from moe_jax.upcycling.attach_spec import AttachSpec
from moe_jax.upcycling.whitened_projector import features_in, whiten

PROJECTOR = "vision/projector/"
"""The paths of a projector begin with it, in memory and on disk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attached:
    """Number of tokens that a picture becomes, and of the parameters of the image encoder and of the projector."""

    tokens: int
    tower: int
    projector: int


def attach(
    source: ModelSource,
    tower: ModelSource,
    out: Destination,
    spec: AttachSpec,
    *,
    preprocessor: Mapping[str, Any] | None = None,
    placeholder: int | None = None,
    progress: Progress = no_progress,
) -> Attached:
    """Writes a language model with an image encoder before it, leaf by leaf; all weights but the projector's are kept.

    Args:
      source: the language model.
      tower: the image encoder.
      out: where the model is written.
      spec: the options.
      preprocessor: keys of the preprocessor_config.json beside the encoder; None: there is none.
      placeholder: the id of the token that stands for a picture; None: there is none.
      progress: called with the leaves that are done.

    Raises:
      InputError: if the language model sees already, is an MoE of a form without a dense beginning, or has an encoder;
        the tower is no image encoder; the options do not fit it; weights are not finite; or `out` exists.
    """
    config = seeing_config(source.config, tower.config, spec, preprocessor=preprocessor, placeholder=placeholder)
    assert config.vision is not None
    features = None if spec.pictures is None else features_in(spec.pictures, tower, config.vision)
    embeddings = None if features is None else np.asarray(source.read(EMBEDDING), np.float32)
    drawn = draw_projector(config, spec.seed, features, embeddings)
    lineage = [*source.lineage, new_lineage_entry("attach", spec.described(), [source, tower])]
    expected = leaf_specs(config)
    made = Attached(
        tokens=tokens_per_picture(config.vision, config.d_model),
        tower=sum(leaf.size for path, leaf in expected.items() if path.startswith(TOWER)),
        projector=sum(leaf.size for leaf in drawn.values()),
    )
    lineage[-1]["measured"] = dataclasses.asdict(made)
    with open_writer(
        out,
        config,
        tokenizer_files=source.tokenizer_files,
        lineage=lineage,
        resume=True,
        allow_nonfinite=spec.allow_nonfinite,
    ) as writer:
        write_each(
            writer, expected, lambda path: _leaf(path, source, tower, drawn), doing="attaching", progress=progress
        )
    return made


def _leaf(path: str, source: ModelSource, tower: ModelSource, drawn: Mapping[str, np.ndarray]) -> np.ndarray:
    if path in drawn:
        return drawn[path]
    if not path.startswith(TOWER):
        return source.read(path)
    return tower.read(_in_tower(path.removeprefix(TOWER), tower.config))


def _in_tower(path: str, tower: ModelConfig) -> str:
    """Returns the path in an image encoder alone, whose norm after the last layer is no longer its last part."""
    first, _, rest = path.partition("/")
    return f"final_norm/{rest}" if first == "pooled_norm" and tower.final_norm else path


def seeing_config(
    config: ModelConfig,
    tower: ModelConfig,
    spec: AttachSpec,
    *,
    preprocessor: Mapping[str, Any] | None = None,
    placeholder: int | None = None,
) -> ModelConfig:
    """Returns the config of a language model with an eye; arguments and errors as of `attach`."""
    config.check_no_encoder("attach")
    config.check_scores_tokens("attach")
    if config.vision is not None:
        raise InputError("attach: the model takes pictures already, and has a vision")
    if tower.patches is None:
        raise InputError(f"--tower {shown(str(spec.tower))} is a {tower.family!r} model, expected an image encoder")
    vision = VisionConfig(
        family="llava",
        tower=without_final_norm(tower),
        processing=_processing(tower, spec, preprocessor),
        features=spec.taken,
        drop_first=int(tower.patches.class_token),
        projector=spec.steps,
        placeholder=placeholder,
    )
    config = dataclasses.replace(config, vision=vision)
    tokens_per_picture(vision, config.d_model)  # raises an error for steps that do not fit
    return config


def _processing(tower: ModelConfig, spec: AttachSpec, preprocessor: Mapping[str, Any] | None) -> ImageProcessing:
    found = usual_processing(tower) if preprocessor is None else read_processing(preprocessor)
    if spec.size is None:
        return found
    return dataclasses.replace(found, size=(spec.size, spec.size), shortest=None, pad=True)


def draw_projector(
    config: ModelConfig,
    seed: int,
    features: Float[np.ndarray, "N n w"] | None = None,
    embeddings: Float[np.ndarray, "V d"] | None = None,
) -> dict[str, np.ndarray]:
    """Returns the leaves of a projector that is drawn anew for a model, by their paths.

    With features of pictures and the embeddings of tokens, it is whitened for them (`whiten`).
    """
    assert config.vision is not None
    steps = make_projector(config.vision, config.d_model, rngs=nnx.Rngs(seed), dtype=jnp.dtype(config.dtype))
    if features is not None and embeddings is not None:
        whiten(steps, features, embeddings, seed=seed)
    leaves, _ = jax.tree.flatten_with_path(nnx.state(nnx.List(steps)))
    return {PROJECTOR + path_name(path): np.asarray(leaf) for path, leaf in leaves}
