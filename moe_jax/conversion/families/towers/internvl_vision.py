"""InternViT: the image encoder of InternVL."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.towers.usual_tower import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    convolution_and_tokens,
    last_norm,
    patches_and_layer,
    read_tower,
    squashed,
    tower_ffn,
    write_tower,
)
from moe_jax.conversion.table import Ignored, Row, linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig

_NORMS = {"layer_norm": "layer", "rms_norm": "rms"}
# Of the norms of queries and keys, whatever that of the others is.
_QK_EPS = 1e-6


def _read(keys: HFConfig) -> ModelConfig:
    keys.must_be("use_absolute_position_embeddings", True)
    named, pools = keys.text("norm_type"), keys.flag("use_mean_pooling")
    if named not in _NORMS:
        raise InputError(f"config.json: norm_type is {shown(named)}, expected {' or '.join(_NORMS)}")
    if not pools and _NORMS[named] != "layer":
        raise InputError("config.json: without use_mean_pooling the last norm is LayerNorm, and norm_type is rms_norm")
    normed = keys.flag("use_qk_norm")
    if normed and keys.required_number("layer_norm_eps") != _QK_EPS:
        raise InputError(f"config.json: with use_qk_norm, layer_norm_eps other than {_QK_EPS:g} is not supported")
    biases = ("q", "k", "v", "o") if keys.flag("attention_bias") else ("o",)
    return read_tower(
        keys,
        "internvl_vision",
        tower_ffn(keys),
        biases=biases,
        qk_norm="projection" if normed else "none",
        branch_scales=True,
        norm=_NORMS[named],
        final_norm=not pools,
        bias=True,
        class_token=True,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    patches, layer = patches_and_layer(config)
    written = write_tower(config)
    size, side = written["patch_size"], written["image_size"]
    return written | {
        "patch_size": [size, size],
        "image_size": [side, side],
        "intermediate_size": usual.dense_ffn(config).dim,
        "norm_type": next((name for name, ours in _NORMS.items() if ours == config.norm), config.norm),
        "attention_bias": "q" in layer.softmax_attention.biases,
        "use_qk_norm": layer.softmax_attention.qk_norm != "none",
        "use_mean_pooling": not (config.final_norm or patches.pooled_norm),
        # A token that stands for hidden patches in training is left out.
        "use_mask_token": False,
    }


_PATCHES, _LAYER = "embeddings.patch_embeddings.projection", "encoder.layer.{i}"

INTERNVL_VISION = Family(
    name="internvl_vision",
    architecture="InternVLVisionModel",
    defaults={
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "num_channels": 3,
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm",
        "attention_bias": False,
        "use_qk_norm": False,
        "use_mean_pooling": True,
        "use_absolute_position_embeddings": True,
    },
    read=_read,
    write=_write,
    table=(
        Row("embeddings.cls_token", "patches/class_token"),
        Ignored(r"embeddings\.mask_token", "stands for hidden patches in training"),
        *linear(_PATCHES, "patches/projection"),
        Row("embeddings.position_embeddings", "patches/positions"),
        *norm(f"{_LAYER}.layernorm_before", "layers/{i}/attention_norm"),
        *(
            row
            for ours, theirs in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "projection_layer"}.items()
            for row in linear(f"{_LAYER}.attention.{theirs}", f"layers/{{i}}/attention/{ours}")
        ),
        *norm(f"{_LAYER}.attention.q_norm", "layers/{i}/attention/q_norm"),
        *norm(f"{_LAYER}.attention.k_norm", "layers/{i}/attention/k_norm"),
        Row(f"{_LAYER}.lambda_1", "layers/{i}/attention_scale"),
        *norm(f"{_LAYER}.layernorm_after", "layers/{i}/mlp_norm"),
        *linear(f"{_LAYER}.mlp.fc1", "layers/{i}/mlp/up"),
        *linear(f"{_LAYER}.mlp.fc2", "layers/{i}/mlp/down"),
        Row(f"{_LAYER}.lambda_2", "layers/{i}/mlp_scale"),
        *last_norm("layernorm"),
    ),
    harmless=("dropout", "hidden_dropout_prob", "projection_dropout", "layer_scale_init_value", "use_mask_token"),
    shapes=convolution_and_tokens(_PATCHES),
    processing=lambda side: squashed(side, IMAGENET_MEAN, IMAGENET_STD),
)
