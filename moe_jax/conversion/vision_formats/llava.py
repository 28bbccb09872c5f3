"""LLaVA as Transformers has it: any language model, a tower, and a projector of two linear maps."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.table import Table, linear
from moe_jax.conversion.vision_formats.usual_format import (
    ACTIVATION_NAMES,
    read_activation,
    read_parts,
    with_head,
)
from moe_jax.conversion.vision_formats.vision_format import Parts, VisionFormat, without_final_norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig, VisionConfig


def _read(keys: HFConfig, parts: Parts) -> ModelConfig:
    text, tower = read_parts(keys, parts)
    tower = without_final_norm(tower)
    activation = read_activation(keys)
    linear_step = "linear" if keys.flag("multimodal_projector_bias") else "linear:unbiased"
    strategy = keys.text("vision_feature_select_strategy")
    if strategy not in ("default", "full"):
        raise InputError(f"config.json: vision_feature_select_strategy={shown(strategy)}: expected 'default' or 'full'")
    features = keys.integers("vision_feature_layer")
    placeholder = keys.integer("image_token_id") if keys.given("image_token_id") else keys.integer("image_token_index")
    vision = VisionConfig(
        family="llava",
        tower=tower,
        processing=parts.processing(tower),
        features=features,
        # The first token goes, whether it is a class token or, as in SigLIP, a patch.
        drop_first=int(strategy == "default"),
        projector=(linear_step, activation, linear_step),
        placeholder=placeholder,
        foreign=keys.unread_keys(),
    )
    return with_head(text, vision, tied=text.tie_embeddings or keys.flag("tie_word_embeddings"))


def _write(config: ModelConfig, vision: VisionConfig, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    first, *middle = vision.projector
    if (
        len(middle) != 2
        or middle[1] != first
        or first not in ("linear", "linear:unbiased")
        or middle[0] not in ACTIVATION_NAMES
    ):
        raise InputError(
            f"the format of 'llava' has a projector of two linear maps with an activation between them, and this model "
            f"has {', '.join(vision.projector)}"
        )
    if vision.drop_first > 1:
        raise InputError(f"the format of 'llava' leaves out one token of the tower or none, not {vision.drop_first}")
    return {
        "text_config": text,
        "vision_config": tower,
        "projector_hidden_act": ACTIVATION_NAMES[middle[0]],
        "multimodal_projector_bias": first == "linear",
        "vision_feature_layer": vision.features[0] if len(vision.features) == 1 else list(vision.features),
        "vision_feature_select_strategy": _strategy(vision),
        **({} if vision.placeholder is None else {"image_token_index": vision.placeholder}),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
    }


def _projector(vision: VisionConfig) -> Table:
    return (
        *linear("multi_modal_projector.linear_1", "vision/projector/0"),
        *linear("multi_modal_projector.linear_2", "vision/projector/2"),
    )


def _processor(vision: VisionConfig) -> dict[str, Any]:
    patches = vision.tower.patches
    assert patches is not None, "a tower has patches"
    return {
        "processor_class": "LlavaProcessor",
        "patch_size": patches.size,
        "num_additional_image_tokens": int(patches.class_token),
        "vision_feature_select_strategy": _strategy(vision),
    }


def _strategy(vision: VisionConfig) -> str:
    return "default" if vision.drop_first else "full"


OTHER_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""Names of the modules of Transformers 5, which it writes if it is told not to keep the names of its files."""

LLAVA = VisionFormat(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    defaults={
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
        "multimodal_projector_bias": True,
        "image_token_index": 32000,
        "image_token_id": None,
        "image_seq_length": 576,
        "tie_word_embeddings": False,
    },
    read=_read,
    write=_write,
    text_names={"": "language_model."},
    tower_prefix="vision_tower.",
    projector=_projector,
    processor=_processor,
    other_names=OTHER_NAMES,
    harmless=("ignore_index", "vocab_size", "pad_token_id"),
)
