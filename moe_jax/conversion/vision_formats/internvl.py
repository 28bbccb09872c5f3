"""InternVL as Transformers has it: any language model, a tower, and squares of features through two linear maps.

Its processor cuts a picture into tiles, each of which is a picture to the model. They are not made here.
"""

from collections.abc import Mapping
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.table import Table, linear, norm
from moe_jax.conversion.vision_formats.llava import OTHER_NAMES
from moe_jax.conversion.vision_formats.usual_format import (
    ACTIVATION_NAMES,
    pixel_shuffle,
    read_activation,
    read_parts,
    with_head,
    with_tie,
)
from moe_jax.conversion.vision_formats.vision_format import Parts, VisionFormat, without_final_norm
from moe_jax.core.errors import InputError, shown
from moe_jax.images.processing import write_processing
from moe_jax.models import ImageProcessing, ModelConfig, VisionConfig

# That of the projector's norm, which no key names.
_NORM = "norm:1e-05"
_TILES = ("crop_to_patches", "min_patches", "max_patches", "patch_size")


def _read(keys: HFConfig, parts: Parts) -> ModelConfig:
    text, tower = read_parts(keys, parts)
    feature = keys.required_integer("vision_feature_layer")
    keys.must_be("vision_feature_select_strategy", "default")  # without the class token: others are no squares
    if feature != -1:  # the last one passes the final norm
        tower = without_final_norm(tower)
    vision = VisionConfig(
        family="internvl",
        tower=tower,
        processing=parts.processing(tower, _whole),
        features=(feature,),
        drop_first=1,
        projector=(f"pixel_shuffle:{_side(keys)}", _NORM, "linear", read_activation(keys), "linear"),
        placeholder=keys.integer("image_token_id"),
        frame=("<img>", "</img>"),
        foreign=keys.unread_keys(),
    )
    return with_head(text, vision, tied=keys.flag("tie_word_embeddings"))


def _side(keys: HFConfig) -> int:
    """Takes the number of features along a side of the squares that are joined."""
    ratio = keys.required_number("downsample_ratio")
    side = round(1 / ratio) if 0.01 <= ratio <= 1 else 0
    if side < 1 or 1 / side != ratio:
        raise InputError(f"config.json: downsample_ratio is {shown(ratio)}, expected 1, 1/2, 1/3, ...")
    return side


def _whole(processing: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of an image processor that makes one tile of a picture."""
    return {key: value for key, value in processing.items() if key not in _TILES}


def _write(config: ModelConfig, vision: VisionConfig, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    side, rest = pixel_shuffle(vision, "internvl")
    if len(rest) != 4 or rest[:2] != (_NORM, "linear") or rest[2] not in ACTIVATION_NAMES or rest[3] != "linear":
        raise InputError(
            f"the format of 'internvl' has a projector of pixel_shuffle, {_NORM} and two linear maps with an "
            f"activation between them, and this model has {', '.join(vision.projector)}"
        )
    if len(vision.features) != 1:
        raise InputError(
            f"the format of 'internvl' takes one hidden state, not features={shown(list(vision.features))}"
        )
    return {
        "text_config": text,
        "vision_config": tower,
        "downsample_ratio": 1 / side,
        "projector_hidden_act": ACTIVATION_NAMES[rest[2]],
        "vision_feature_layer": vision.features[0],
        "vision_feature_select_strategy": "default",
        **({} if vision.placeholder is None else {"image_token_id": vision.placeholder}),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
    }


def _projector(vision: VisionConfig) -> Table:
    return (
        *norm("multi_modal_projector.layer_norm", "vision/projector/1"),
        *linear("multi_modal_projector.linear_1", "vision/projector/2"),
        *linear("multi_modal_projector.linear_2", "vision/projector/4"),
    )


def _processor(vision: VisionConfig) -> dict[str, Any]:
    (rows, columns), (side, _) = vision.grid, pixel_shuffle(vision, "internvl")
    return {"processor_class": "InternVLProcessor", "image_seq_length": rows * columns // side**2}


def _image_processor(processing: ImageProcessing) -> dict[str, Any]:
    return write_processing(processing) | {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": False}


INTERNVL = VisionFormat(
    name="internvl",
    architecture="InternVLForConditionalGeneration",
    defaults={
        "image_token_id": 151667,
        "image_seq_length": 256,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
    text_names={"": "language_model."},
    tower_prefix="vision_tower.",
    projector=_projector,
    processor=_processor,
    other_names=OTHER_NAMES,
    harmless=("vocab_size", "pad_token_id"),
    completed_by_names=with_tie,
    image_processor=_image_processor,
    note="its tiles are not made: a picture is one tile, the whole of it",
)
