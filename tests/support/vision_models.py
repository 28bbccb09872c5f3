"""Small random image encoders and LLaVAs of Transformers."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.families.cases import CASES, SMALL

TOWERS = {
    "clip": ("CLIPVisionConfig", "CLIPVisionModel"),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel"),
    "dinov2": ("Dinov2Config", "Dinov2Model"),
    "internvl": ("InternVLVisionConfig", "InternVLVisionModel"),
    "smolvlm": ("SmolVLMVisionConfig", "SmolVLMVisionTransformer"),
}
"""Names of the config and the model in Transformers."""


class Shape(NamedTuple):
    """Of a tower; `hidden` is a multiple of `width`, `side` the patches along a side of a picture."""

    width: int
    heads: int
    hidden: int
    layers: int
    patch: int
    side: int


SHAPES = (Shape(32, 4, 64, 3, 4, 5), Shape(24, 2, 96, 1, 7, 3), Shape(48, 6, 96, 4, 2, 4), Shape(16, 1, 48, 2, 5, 6))
SMALL_EYE = Shape(16, 2, 32, 3, 4, 2)
PLACEHOLDER = 95


def tower_config(name: str, shape: Shape, **more: Any) -> Any:
    """The config of a tower in Transformers."""
    import transformers

    width = {"mlp_ratio": shape.hidden // shape.width} if name == "dinov2" else {"intermediate_size": shape.hidden}
    given = {
        **{"hidden_size": shape.width, "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers},
        **{"patch_size": shape.patch, "image_size": shape.patch * shape.side, **width, **more},
    }
    return getattr(transformers, TOWERS[name][0])(**given)


def made(model: Any) -> Any:
    """Draws all parameters anew: biases, positions, LayerScales, and norms about 1."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            is_scale = "norm" in key and not key.endswith("bias") or "layer_scale" in key or "lambda_" in key
            value.copy_(1 + 0.1 * noise if is_scale else 0.15 * noise)
    return model.float().eval()


def random_tower(name: str, shape: Shape, **more: Any) -> Any:
    """A tower of Transformers whose every parameter is random and large enough to matter."""
    import transformers

    config = tower_config(name, shape, **more)
    return made(getattr(transformers, TOWERS[name][1])._from_config(config, attn_implementation="eager"))


def random_llava(text: str, tower: str = "clip", *, of_tower: Any = None, of_text: Any = None, **more: Any) -> Any:
    """A LLaVA of Transformers over a case of `tests/families/cases`, all random.

    Args:
      text: name of the case.
      tower: a key of `TOWERS`.
      of_tower, of_text: further keys of their configs.
      more: further keys of the whole.
    """
    import transformers

    file = CASES[text]
    keys = {**SMALL, **copy.deepcopy(file.CASES[text]), **(of_text or {})}
    config = transformers.LlavaConfig(
        text_config=getattr(transformers, file.CONFIG)(**keys),
        vision_config=tower_config(tower, SMALL_EYE, **(of_tower or {})),
        **{"image_token_index": PLACEHOLDER, **more},
    )
    return made(transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager"))


LLAVAS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "clip", {}),
    "qwen2": ("qwen2", "dinov2", {"vision_feature_select_strategy": "full"}),
    "stablelm": ("stablelm", "clip", {"vision_feature_layer": [-3, 1, -1]}),
    "phi": ("phi", "siglip", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "qwen3_moe": ("qwen3_moe", "clip", {"of_text": {"router_aux_loss_coef": 0.0}, "multimodal_projector_bias": False}),
    "gemma2": ("gemma2", "dinov2", {"vision_feature_layer": -1}),
    "mixtral": ("mixtral", "siglip", {"of_text": {"router_aux_loss_coef": 0.0}}),
    "gemma3_text": ("gemma3_text", "clip", {"projector_hidden_act": "relu"}),
    "mistral": ("mistral", "siglip", {"vision_feature_layer": [0, -1]}),
    "olmoe": ("olmoe", "clip", {"of_text": {"router_aux_loss_coef": 0.0}}),
    "llama-tied-mha": ("llama-tied-mha", "clip", {}),
}
"""Name: the language model, the tower, and what else is said."""


def made_llava(name: str) -> Any:
    """A case of `LLAVAS`."""
    text, tower, more = LLAVAS[name]
    return random_llava(text, tower, **more)


TILED_EYE = Shape(16, 2, 32, 3, 4, 4)
"""Whose patches make squares."""


def random_tiled(kind: str, text: str, *, of_tower: Any = None, of_text: Any = None, **more: Any) -> Any:
    """An InternVL or a SmolVLM of Transformers over a case of `tests/families/cases`, all random.

    Args:
      kind: `InternVL` or `SmolVLM`.
      text: name of the case.
      of_tower, of_text: further keys of their configs.
      more: further keys of the whole.
    """
    import transformers

    file = CASES[text]
    keys = {**SMALL, **copy.deepcopy(file.CASES[text]), **(of_text or {}), "eos_token_id": None}
    eye = {
        **{"hidden_size": TILED_EYE.width, "num_attention_heads": TILED_EYE.heads, "patch_size": TILED_EYE.patch},
        **{"num_hidden_layers": TILED_EYE.layers, "intermediate_size": TILED_EYE.hidden},
        **{"image_size": TILED_EYE.patch * TILED_EYE.side, **(of_tower or {})},
    }
    config = getattr(transformers, f"{kind}Config")(
        text_config=getattr(transformers, file.CONFIG)(**keys).to_dict(),
        vision_config=eye,
        **{"image_token_id": PLACEHOLDER, "tie_word_embeddings": False, **more},
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")
    return made(model._from_config(config, attn_implementation="eager"))


TILED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "internvl": ("InternVL", "qwen3_moe", {"of_text": {"router_aux_loss_coef": 0.0}}),
    "smolvlm": ("SmolVLM", "llama", {}),
    "internvl-6b": (
        "InternVL",
        "qwen2",
        {
            "of_tower": {"norm_type": "rms_norm", "use_qk_norm": True},
            **{"vision_feature_layer": -2, "projector_hidden_act": "relu"},
        },
    ),
    "internvl-normed": ("InternVL", "llama", {"of_tower": {"use_mean_pooling": False, "attention_bias": True}}),
    "internvl-before-the-norm": (
        "InternVL",
        "mistral",
        {"of_tower": {"use_mean_pooling": False}, **{"vision_feature_layer": 3, "downsample_ratio": 0.25}},
    ),
    "internvl-tied": ("InternVL", "qwen3", {"tie_word_embeddings": True}),
    "internvl-mixtral": ("InternVL", "mixtral", {"of_text": {"router_aux_loss_coef": 0.0}}),
    "smolvlm-moe": ("SmolVLM", "qwen3_moe", {"of_text": {"router_aux_loss_coef": 0.0}, "scale_factor": 4}),
    "smolvlm-tied": ("SmolVLM", "qwen2", {"tie_word_embeddings": True}),
    "smolvlm-stablelm": ("SmolVLM", "stablelm", {}),
    "smolvlm-gemma": ("SmolVLM", "gemma2", {}),
}
"""Name: the model, its language model, and what else is said."""


class Seen(NamedTuple):
    """A batch of texts with pictures, for both sides."""

    ids: np.ndarray  # [B, T], with placeholders
    pixels: np.ndarray  # uint8[B, M, H, W, 3]
    slots: np.ndarray  # [B, T]
    pictures: list[np.ndarray]  # all of them in order, as Transformers takes them


def batch_of(counts: Sequence[int], per_picture: int, length: int, size: tuple[int, int]) -> Seen:
    """Rows of so many pictures each, one directly after the other, from the third token on."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 90, (len(counts), length)).astype(np.int32)
    slots = np.zeros_like(ids)
    pixels = rng.integers(0, 256, (len(counts), max(1, *counts), *size, 3)).astype(np.uint8)
    for row, count in enumerate(counts):
        taken = slice(2, 2 + count * per_picture)
        ids[row, taken], slots[row, taken] = PLACEHOLDER, 1 + np.arange(count * per_picture)
    pictures = [pixels[row, index] for row, count in enumerate(counts) for index in range(count)]
    return Seen(ids, pixels, slots, pictures)


def normalised(pictures: Sequence[np.ndarray], mean: Sequence[float], std: Sequence[float]) -> Any:
    """Pictures as Transformers takes them, float32[N, 3, H, W]."""
    import torch

    stacked = (np.stack(pictures) * np.float64(1 / 255)).astype(np.float32)
    whole = (stacked - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return torch.tensor(np.moveaxis(whole, -1, 1))
