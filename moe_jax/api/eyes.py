"""`moe_jax.give_eye`: a language model that sees, of a language model and an image encoder."""

import os
from collections.abc import Sequence

from moe_jax.api.model import Model, ModelOrPath, destination, open_model, result
from moe_jax.images.image_config import ImageProcessing
from moe_jax.model_io.in_memory import open_writer
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.upcycling.new_eye import config_with_eye, leaves_with_eye


def give_eye(
    model: ModelOrPath,
    tower: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    features: Sequence[int] = (-2,),
    projector: Sequence[str] = ("linear", "gelu", "linear"),
    placeholder: int | None = None,
    processing: ImageProcessing | None = None,
    seed: int = 0,
) -> Model:
    """Gives a language model an eye, in the form of LLaVA: an image encoder, and a new projector, still to be trained.

    Args:
      model: a language model that takes no pictures, or the path of one; it may be an MoE.
      tower: the path of an image encoder, such as a Hugging Face directory of CLIP.
      out: where a model directory appears, which must not exist; None: the model stays in memory.
      features: hidden states of the encoder that are taken, as in `VisionConfig`.
      projector: its steps, as in `VisionConfig`.
      placeholder: the token id that stands for a picture in a prompt.
      processing: how a picture becomes pixels; None: as the encoder's preprocessor_config.json says, or as is usual.
      seed: of the projector's weights.

    Returns:
      The model that sees; all other weights are those of the model and of the encoder, bit for bit.

    Raises:
      FileNotFoundError: if there is nothing at a path.
      InputError: if the model sees already, `tower` is no image encoder, parts do not fit each other, weights are not
        finite, or `out` exists.
    """
    target, source, eye = destination(out), open_model(model), open_model(tower, towers=True)
    how = {"features": list(features), "projector": list(projector), "placeholder": placeholder}
    config = config_with_eye(
        source, eye, features=features, projector=projector, placeholder=placeholder, processing=processing
    )
    entry = new_lineage_entry("give-eye", {**how, "seed": seed}, [source, eye])
    with open_writer(
        target, config, tokenizer_files=source.tokenizer_files, lineage=[*source.lineage, entry]
    ) as writer:
        for leaves in leaves_with_eye(config, source, eye, seed):
            if all(writer.mine(path) for path in leaves):
                writer.write(leaves)
    return result(target, model)
