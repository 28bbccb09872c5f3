"""Image encoders: CLIP's and SigLIP's vision models, and DINOv2."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.towers.usual_tower import (
    HALF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    convolution,
    convolution_and_tokens,
    last_norm,
    read_tower,
    squashed,
    tower_ffn,
    write_tower,
)
from moe_jax.conversion.table import Ignored, Row, Table, linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# The base size of all, which a config leaves out.
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3, "image_size": 224}

# --- CLIP and SigLIP ------------------------------------------------------------------------------

_CONVOLUTION = "embeddings.patch_embedding"


def _clip_table(*others: Row | Ignored) -> Table:
    layer = "encoder.layers.{i}"
    return (
        *others,
        *linear(_CONVOLUTION, "patches/projection"),
        Row("embeddings.position_embedding.weight", "patches/positions"),
        *norm(f"{layer}.layer_norm1", "layers/{i}/attention_norm"),
        *(
            row
            for ours, theirs in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}.items()
            for row in linear(f"{layer}.self_attn.{theirs}", f"layers/{{i}}/attention/{ours}")
        ),
        *norm(f"{layer}.layer_norm2", "layers/{i}/mlp_norm"),
        *linear(f"{layer}.mlp.fc1", "layers/{i}/mlp/up"),
        *linear(f"{layer}.mlp.fc2", "layers/{i}/mlp/down"),
        *last_norm("post_layernorm"),
    )


# Of whole CLIP and SigLIP models, whose towers are read.
_TEXT = Ignored(
    r"(text_model|text_projection|visual_projection)\..*|logit_(scale|bias)", "of the text encoder beside the tower"
)
_POSITION_IDS = Ignored(r"embeddings\.position_ids", "positions 0, 1, ..., which older releases of Transformers stored")


def _read_clip(keys: HFConfig) -> ModelConfig:
    ffn = tower_ffn(keys)
    return read_tower(keys, "clip_vision_model", ffn, class_token=True, pre_norm=True, pooled_norm=True)


def _write_clip(config: ModelConfig) -> dict[str, Any]:
    return write_tower(config) | {"intermediate_size": usual.dense_ffn(config).dim}


CLIP = Family(
    name="clip_vision_model",
    architecture="CLIPVisionModel",
    defaults={
        **_BASE,
        "intermediate_size": 3072,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    read=_read_clip,
    write=_write_clip,
    table=_clip_table(
        Row("embeddings.class_embedding", "patches/class_token"),
        *norm("pre_layrnorm", "patches/norm"),
        _POSITION_IDS,
        _TEXT,
    ),
    harmless=("projection_dim",),
    shapes=convolution(_CONVOLUTION),
    optional_prefix="vision_model.",
    within=("clip", "vision_config"),
    processing=lambda side: squashed(side, CLIP_MEAN, CLIP_STD, shortest=side),
)


def _read_siglip(keys: HFConfig) -> ModelConfig:
    return read_tower(keys, "siglip_vision_model", tower_ffn(keys), bias=True)


SIGLIP = Family(
    name="siglip_vision_model",
    architecture="SiglipVisionModel",
    defaults={
        **_BASE,
        "intermediate_size": 3072,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    read=_read_siglip,
    # Features of patches do not pass the head, whose weights are left out.
    write=lambda config: _write_clip(config) | {"vision_use_head": False},
    table=_clip_table(
        Ignored(r"head\..*", "of the head that pools a picture into one vector, which no feature of a patch passes"),
        _POSITION_IDS,
        _TEXT,
    ),
    harmless=("vision_use_head", "projection_dim"),
    shapes=convolution(_CONVOLUTION),
    optional_prefix="vision_model.",
    within=("siglip", "vision_config"),
    processing=lambda side: squashed(side, HALF, HALF),
)

# --- DINOv2 ---------------------------------------------------------------------------------------

_DINO = "embeddings.patch_embeddings.projection"


def _read_dinov2(keys: HFConfig) -> ModelConfig:
    keys.must_be("use_swiglu_ffn", False)
    keys.must_be("qkv_bias", True)
    width, ratio = keys.required_size("hidden_size"), keys.required_number("mlp_ratio")
    return read_tower(
        keys, "dinov2", tower_ffn(keys, int(width * ratio)), branch_scales=True, bias=True, class_token=True
    )


def _write_dinov2(config: ModelConfig) -> dict[str, Any]:
    dim = usual.dense_ffn(config).dim
    if dim % config.d_model:
        raise InputError(f"the format of 'dinov2' has FFNs of a multiple of {config.d_model} neurons, not {shown(dim)}")
    # A token that stands for hidden patches in training is left out.
    return write_tower(config) | {"mlp_ratio": dim // config.d_model, "use_mask_token": False}


_DINO_LAYER = "encoder.layer.{i}"

DINOV2 = Family(
    name="dinov2",
    architecture="Dinov2Model",
    defaults={
        **_BASE,
        "mlp_ratio": 4,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
    },
    read=_read_dinov2,
    write=_write_dinov2,
    table=(
        Row("embeddings.cls_token", "patches/class_token"),
        Ignored(r"embeddings\.mask_token", "stands for hidden patches in training"),
        *linear(_DINO, "patches/projection"),
        Row("embeddings.position_embeddings", "patches/positions"),
        *norm(f"{_DINO_LAYER}.norm1", "layers/{i}/attention_norm"),
        *(
            row
            for ours, theirs in {"q": "query", "k": "key", "v": "value"}.items()
            for row in linear(f"{_DINO_LAYER}.attention.attention.{theirs}", f"layers/{{i}}/attention/{ours}")
        ),
        *linear(f"{_DINO_LAYER}.attention.output.dense", "layers/{i}/attention/o"),
        Row(f"{_DINO_LAYER}.layer_scale1.lambda1", "layers/{i}/attention_scale"),
        *norm(f"{_DINO_LAYER}.norm2", "layers/{i}/mlp_norm"),
        *linear(f"{_DINO_LAYER}.mlp.fc1", "layers/{i}/mlp/up"),
        *linear(f"{_DINO_LAYER}.mlp.fc2", "layers/{i}/mlp/down"),
        Row(f"{_DINO_LAYER}.layer_scale2.lambda1", "layers/{i}/mlp_scale"),
        *last_norm("layernorm"),
    ),
    harmless=(
        "layerscale_value",
        "drop_path_rate",
        "apply_layernorm",
        "reshape_hidden_states",
        "use_mask_token",
        "stage_names",
        "out_features",
        "out_indices",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
    ),
    shapes=convolution_and_tokens(_DINO),
    optional_prefix="dinov2.",
    processing=lambda side: squashed(side, IMAGENET_MEAN, IMAGENET_STD, shortest=side * 256 // 224),
)
