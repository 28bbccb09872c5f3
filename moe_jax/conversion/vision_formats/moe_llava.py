"""The eye of MoE-LLaVA and Med-MoE: the keys and tensors beside those of their language models.

The config names the image encoder (`mm_image_tower`) and does not describe it; nor must a checkpoint hold its weights.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.table import Table, linear
from moe_jax.conversion.vision_formats.vision_format import Parts, VisionFormat, without_final_norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig, VisionConfig

# A key of ours, where the name alone does not say what the encoder is.
TOWER_KEY = "mm_image_tower_config"

_CLIP_LARGE = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}
# Image encoders by the last part of their names: Med-MoE's configs name a folder.
_KNOWN: dict[str, Mapping[str, Any]] = {
    "clip-vit-large-patch14-336": {**_CLIP_LARGE, "image_size": 336},
    "clip-vit-large-patch14": {**_CLIP_LARGE, "image_size": 224},
    "siglip-so400m-patch14-384": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 384,
    },
}
_ASPECTS = ("pad", "square")
# How it was trained, tokens that no forward pass uses, and video, without a tower for it.
_KEPT = (
    *("freeze_mm_mlp_adapter", "mm_projector_lr", "mm_use_im_patch_token", "tokenizer_padding_side"),
    *("tune_mm_mlp_adapter", "use_mm_proj"),
    *("video_projector_type", "video_global_proj", "video_temproal_proj", "video_spatial_proj"),
)


def _read(name_of_format: str, keys: HFConfig, parts: Parts) -> ModelConfig:
    text, name = parts.text, keys.text("mm_image_tower")
    assert text is not None, "the keys stand beside those of a language model"
    keys.must_be("mm_video_tower", None)
    if name is None:
        return text
    keys.must_be("mm_use_im_start_end", False)
    tower = _tower(keys, parts, name)
    aspect, select = keys.text("image_aspect_ratio"), keys.text("mm_vision_select_feature")
    if aspect is not None and aspect not in _ASPECTS:
        raise InputError(f"config.json: image_aspect_ratio is {shown(aspect)}, expected {' or '.join(_ASPECTS)}")
    if select not in ("patch", "cls_patch"):
        raise InputError(f"config.json: mm_vision_select_feature is {shown(select)}, expected 'patch' or 'cls_patch'")
    width = keys.integer("mm_hidden_size")
    if width not in (None, tower.d_model):
        raise InputError(f"config.json: mm_hidden_size is {width}, and features of {name} have {tower.d_model} entries")
    vision = VisionConfig(
        family=name_of_format,
        tower=tower,
        processing=replace(parts.processing(tower), pad=aspect == "pad"),
        features=(keys.required_integer("mm_vision_select_layer"),),
        # The first token goes, whether it is a class token or, as in SigLIP, a patch.
        drop_first=int(select == "patch"),
        projector=_steps(keys.text("image_projector_type") or "linear"),
        foreign={"mm_image_tower": name, **keys.given_among(_KEPT)},
    )
    return replace(text, vision=vision, foreign=keys.unread_keys())


def _tower(keys: HFConfig, parts: Parts, name: str) -> ModelConfig:
    if keys.mapping(TOWER_KEY) is None:
        raise InputError(
            f"config.json names the image encoder {shown(name)} (mm_image_tower), whose config is not known; give its "
            "directory with moe-jax convert --vision-tower DIR"
        )
    tower = parts.model(TOWER_KEY)
    if tower.patches is None:
        raise InputError(f"config.json: {TOWER_KEY} is of a {tower.family!r} model, expected an image encoder")
    return without_final_norm(tower)


def _with_known_tower(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of a config.json, with the config of an image encoder that is named and known."""
    known = _known_tower(data.get("mm_image_tower"))
    return data if known is None or TOWER_KEY in data else {**data, TOWER_KEY: dict(known)}


def _known_tower(name: Any) -> Mapping[str, Any] | None:
    return _KNOWN.get(name.rstrip("/").rpartition("/")[2]) if isinstance(name, str) else None


def _steps(projector: str) -> tuple[str, ...]:
    """Returns the steps of a projector of this type."""
    mlp = re.fullmatch(r"(pool_)?mlp([1-9][0-9]?)x_gelu", projector)
    if mlp is not None:
        return ("pool:2",) * bool(mlp[1]) + ("linear", *("gelu", "linear") * (int(mlp[2]) - 1))
    if projector not in ("linear", "identity"):
        raise InputError(
            f"config.json: image_projector_type is {shown(projector)}, supported are linear, identity, mlpNx_gelu and "
            "pool_mlpNx_gelu"
        )
    return ("linear",) if projector == "linear" else ()


def _projector_type(steps: tuple[str, ...]) -> str:
    pool, maps = ("pool_", steps[1:]) if steps[:1] == ("pool:2",) else ("", steps)
    depth = (len(maps) + 1) // 2
    if not steps:
        return "identity"
    if maps == ("linear", *("gelu", "linear") * (depth - 1)):
        return f"{pool}mlp{depth}x_gelu"
    raise InputError(
        f"the format of 'moe_llava' has projectors of linear maps with 'gelu' between them, perhaps after 'pool:2', "
        f"and this model has {', '.join(steps)}"
    )


def _write(config: ModelConfig, vision: VisionConfig, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    if vision.drop_first > 1 or len(vision.features) != 1:
        raise InputError(
            f"the format of 'moe_llava' takes one hidden state of the tower, without its first token or with it, not "
            f"features={shown(list(vision.features))} and drop_first={vision.drop_first}"
        )
    name = vision.foreign.get("mm_image_tower")
    if not isinstance(name, str):
        makers = {"clip_vision_model": "openai", "siglip_vision_model": "google"}
        alike = (
            f"{makers[keys['model_type']]}/{known}" for known, keys in _KNOWN.items() if keys.items() <= tower.items()
        )
        name = next(alike, vision.tower.family)
    known = _known_tower(name)
    return {
        **text,
        "mm_image_tower": name,
        **({} if known is not None and known.items() <= tower.items() else {TOWER_KEY: tower}),
        "mm_video_tower": None,
        "mm_hidden_size": vision.tower.d_model,
        "mm_vision_select_layer": vision.features[0],
        "mm_vision_select_feature": "patch" if vision.drop_first else "cls_patch",
        "mm_use_im_start_end": False,
        "image_projector_type": _projector_type(vision.projector),
        "image_aspect_ratio": "pad" if vision.processing.pad else "square",
    }


def _format(name: str, body: str) -> VisionFormat:
    """Returns the format of models whose own tensors are below `body`."""
    plain, tower = f"{body}.mm_projector.", f"{body}.image_tower.image_tower.vision_model."
    projector = f"{plain}image_spatial_proj."

    def rows(vision: VisionConfig) -> Table:
        pooled = int(vision.projector[:1] == ("pool:2",))
        return tuple(
            row
            for i, step in enumerate(vision.projector)
            if step == "linear"
            for row in linear(f"{projector}{'block.' * pooled}{i - pooled}", f"vision/projector/{i}")
        )

    return VisionFormat(
        name=name,
        architecture="",  # the language model's
        defaults={},
        config_pads=True,
        read=lambda keys, parts: _read(name, keys, parts),
        write=_write,
        text_names={"": ""},
        tower_prefix=tower,
        projector=rows,
        text_key=None,
        tower_key=TOWER_KEY,
        other_names={
            # A single linear map that is no list of one, here and in plain LLaVA, which has no videos beside pictures.
            **{f"{at}{part}": f"{projector}0.{part}" for at in (projector, plain) for part in ("weight", "bias")},
            **{projector: projector, plain: projector},
            **{tower: tower, f"{body}.image_tower.image_tower.": tower},
        },
        completed=_with_known_tower,
    )


MOE_LLAVA = _format("moe_llava", "model")
MOE_LLAVA_QWEN = _format("moe_llava_qwen", "transformer")
