"""Shared by the families of image encoders: their keys, their tensors, and how pictures are processed."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from moe_jax.conversion.config_keys import HFConfig, is_integer
from moe_jax.conversion.families import usual
from moe_jax.conversion.table import Table, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import (
    AttentionConfig,
    FFNConfig,
    ImageProcessing,
    LayerConfig,
    ModelConfig,
    PatchesConfig,
    RopeConfig,
)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
_ALL = ("q", "k", "v", "o")


def read_tower(
    keys: HFConfig,
    family: str,
    ffn: FFNConfig,
    *,
    biases: tuple[Any, ...] = _ALL,
    qk_norm: Literal["none", "projection"] = "none",
    branch_scales: bool = False,
    norm: str = "layer",
    final_norm: bool | None = None,
    **patches: bool,
) -> ModelConfig:
    """Reads a tower.

    Its patches have a class token, a bias or norms as `PatchesConfig` names them; it has a final norm, if nothing else
    is said, where none stands aside.
    """
    width, heads = keys.required_size("hidden_size"), keys.required_integer("num_attention_heads")
    if heads < 1 or width % heads:
        raise InputError(f"config.json: hidden_size={width} cannot be divided by num_attention_heads={heads}")
    size, side = _side(keys, "patch_size"), _side(keys, "image_size")
    if size < 1 or side < size:
        raise InputError(f"config.json: image_size={side} holds no patch of patch_size={size}")
    keys.keep("image_size", side)  # of which the grid keeps whole patches only
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        biases=biases,
        qk_norm=qk_norm,
        mask="bidirectional",
    )
    made = PatchesConfig(
        size=size, grid=(side // size, side // size), channels=keys.required_integer("num_channels"), **patches
    )
    layer = LayerConfig(attention=attention, mlp=ffn, branch_scales=branch_scales)
    return ModelConfig(
        family=family,
        vocab_size=0,
        d_model=width,
        max_positions=made.num_positions,
        layers=(layer,) * usual.num_layers(keys),
        rope=RopeConfig(fraction=0.0),
        norm=norm,  # type: ignore[arg-type]
        norm_eps=keys.required_number("layer_norm_eps"),
        final_norm=not made.pooled_norm if final_norm is None else final_norm,
        dtype=usual.read_dtype(keys),
        patches=made,
        foreign=keys.unread_keys(),
    )


def _side(keys: HFConfig, name: str) -> int:
    """Takes the side of a square; newer releases of Transformers write height and width."""
    keys.require(name)
    sides = keys.integers(name)
    if len(sides) not in (1, 2) or len(set(sides)) != 1:
        raise InputError(f"config.json: {name} is {shown(list(sides))}, expected the side of a square")
    return sides[0]


def tower_ffn(keys: HFConfig, dim: int | None = None) -> FFNConfig:
    """Reads the FFN of a tower, of `intermediate_size` neurons if their number is not given."""
    dim = keys.required_integer("intermediate_size") if dim is None else dim
    return FFNConfig(dim=dim, gated=False, activation=usual.read_activation(keys), bias=True)


def write_tower(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `read_tower` reads, but for the width of the FFNs."""
    patches, layer = patches_and_layer(config)
    rows, columns = patches.grid
    if rows != columns:
        raise InputError(f"the format of {config.family!r} has square pictures, not {rows} x {columns} patches")
    size = config.foreign.get("image_size")
    if not is_integer(size) or size // patches.size != rows:
        size = rows * patches.size
    return {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.softmax_attention.num_heads,
        "patch_size": patches.size,
        "image_size": size,
        "num_channels": patches.channels,
        "hidden_act": usual.write_activation(usual.dense_ffn(config)),
        "layer_norm_eps": config.norm_eps,
        "torch_dtype": config.dtype,
    }


def patches_and_layer(config: ModelConfig) -> tuple[PatchesConfig, LayerConfig]:
    """Returns the patches and the one shape of all layers; raises `InputError` if it is no tower or there are more."""
    if config.patches is None:
        raise InputError(f"the format of {config.family!r} holds image encoders, and no others")
    return config.patches, usual.same_in_all_layers(config, "shape", lambda layer: layer)


def convolution(tensor: str) -> Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]:
    """Returns the shape of the kernel of the patches, for `Family.shapes`."""

    def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        patches, _ = patches_and_layer(config)
        return {f"{tensor}.weight": (config.d_model, patches.channels, patches.size, patches.size)}

    return shapes


def convolution_and_tokens(tensor: str) -> Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]:
    """Returns the shapes of that kernel, and of positions and a class token, which have a further axis there."""

    def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        patches, _ = patches_and_layer(config)
        return {
            **convolution(tensor)(config),
            "embeddings.position_embeddings": (1, patches.num_positions, config.d_model),
            "embeddings.cls_token": (1, 1, config.d_model),
        }

    return shapes


def squashed(side: int, mean: tuple[float, ...], std: tuple[float, ...], **more: Any) -> ImageProcessing:
    """Returns the processing that makes squares of pictures, without regard to their proportions."""
    return ImageProcessing(size=(side, side), mean=mean, std=std, **more)  # type: ignore[arg-type]


def last_norm(tensor: str) -> Table:
    """In a model that sees, features do not pass it, which of SigLIP and DINOv2 alone they do."""
    return *norm(tensor, "final_norm"), *norm(tensor, "pooled_norm")
