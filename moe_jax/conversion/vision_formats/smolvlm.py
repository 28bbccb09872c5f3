"""SmolVLM as Transformers has it: any language model, SigLIP, and squares of features through one linear map.

Its processor cuts a picture into tiles, each of which is a picture to the model, and adds the whole. Only that is made
here, of the picture itself; the processor makes it of a picture that it has resized before.
"""

from collections.abc import Mapping
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.table import Row, Table
from moe_jax.conversion.vision_formats.usual_format import pixel_shuffle, read_parts, with_head, with_tie
from moe_jax.conversion.vision_formats.vision_format import Parts, VisionFormat
from moe_jax.core.errors import InputError, shown
from moe_jax.images.processing import write_processing
from moe_jax.models import ImageProcessing, ModelConfig, VisionConfig

_TILES = ("do_image_splitting", "do_pad", "max_image_size", "return_row_col_info", "size", "video_sampling")

# The side of a tile, in pixels, of a processor whose file leaves it out.
_TILE = 364
# What published configs hold and no code of Transformers reads.
_NOTES = (
    "use_reentrant_checkpointing",
    *(f"text_config.{key}" for key in ("is_llama_config", "neftune_noise_alpha", "perceiver_config")),
    *(f"text_config.{key}" for key in ("pixel_shuffle_factor", "qk_layer_norms", "transformers.js_config")),
    "text_config.use_resampler",
    *(f"vision_config.{key}" for key in ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")),
)


def _read(keys: HFConfig, parts: Parts) -> ModelConfig:
    text, tower = read_parts(keys, parts)
    side = keys.required_integer("scale_factor")
    if side < 1:
        raise InputError(f"config.json: scale_factor is {side}, expected a number from 1 on")
    assert tower.patches is not None
    processing, grid = parts.processing(tower, _whole), tower.patches.grid
    if tower.patches.grid_of(processing.size) != grid:
        raise InputError(
            f"preprocessor_config.json: pictures of {processing.size[0]} x {processing.size[1]} pixels have not the "
            f"{grid[0]} x {grid[1]} patches that vision_config has positions for"
        )
    vision = VisionConfig(
        family="smolvlm",
        tower=tower,
        processing=processing,
        features=(-1,),
        drop_first=0,
        projector=(f"pixel_shuffle:{side}", "linear:unbiased"),
        placeholder=keys.integer("image_token_id"),
        frame=("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
        foreign=keys.unread_keys(),
    )
    whole = keys.flag("tie_word_embeddings")
    # Of what both say, Transformers 5 looks at the whole, and older releases at the language model.
    return with_head(text, vision, tied=whole if keys.given("tie_word_embeddings") else text.tie_embeddings)


def _whole(processing: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of an image processor that makes the last tile alone, of the whole picture."""
    largest = processing.get("max_image_size", {"longest_edge": _TILE})
    side = largest.get("longest_edge") if isinstance(largest, Mapping) else largest
    rest = {key: value for key, value in processing.items() if key not in _TILES}
    return {"resample": 1, **rest, "size": {"height": side, "width": side}}


def _write(config: ModelConfig, vision: VisionConfig, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    side, rest = pixel_shuffle(vision, "smolvlm")
    if rest != ("linear:unbiased",):
        raise InputError(
            "the format of 'smolvlm' has a projector of pixel_shuffle and linear:unbiased, and this model has "
            f"{', '.join(vision.projector)}"
        )
    if vision.features != (-1,) or vision.drop_first:
        raise InputError(
            "the format of 'smolvlm' takes all of the last hidden state, not "
            f"features={shown(list(vision.features))} and drop_first={vision.drop_first}"
        )
    return {
        "text_config": text,
        "vision_config": tower,
        "scale_factor": side,
        **({} if vision.placeholder is None else {"image_token_id": vision.placeholder}),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
    }


def _projector(vision: VisionConfig) -> Table:
    name = "model.connector.modality_projection.proj.weight"
    return (Row(name, "vision/projector/1/kernel", transpose=True),)


def _processor(vision: VisionConfig) -> dict[str, Any]:
    (rows, columns), (side, _) = vision.grid, pixel_shuffle(vision, "smolvlm")
    return {"processor_class": "SmolVLMProcessor", "image_seq_len": rows * columns // side**2}


def _image_processor(processing: ImageProcessing) -> dict[str, Any]:
    side = {"longest_edge": max(processing.size)}
    return {
        **write_processing(processing),
        "image_processor_type": "SmolVLMImageProcessor",
        "do_image_splitting": False,
        "size": side,
        "max_image_size": side,
    }


SMOLVLM = VisionFormat(
    name="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
    defaults={"image_token_id": 128257, "scale_factor": 2, "tie_word_embeddings": False},
    read=_read,
    write=_write,
    text_names={"model.": "model.text_model.", "lm_head.": "lm_head."},
    tower_prefix="model.vision_model.",
    projector=_projector,
    processor=_processor,
    harmless=("vocab_size", "pad_token_id", "use_cache", *_NOTES),
    completed_by_names=with_tie,
    image_processor=_image_processor,
    note="its tiles are not made: a picture is one tile, the whole of it",
)
