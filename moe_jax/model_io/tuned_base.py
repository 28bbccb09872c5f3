"""A tuned model and its base: the config of the base, and the paths of its leaves in the tuned model.

A *tuned* model has adapters, LoRA or NF4 kernels; its base is the model without them. Paths are those of a model
directory.
"""

import dataclasses
import re
from typing import Any

from moe_jax.experts.forms.protocol import BesideBase
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig

_LAYER = re.compile(r"layers/(\d+)/mlp/(.*)")
_NF4 = re.compile(r"(.*)/nf4/([^/]+)")
_PESC_BASE = "experts/base/"


def base_config(config: ModelConfig, *, keep_nf4: bool = False) -> ModelConfig:
    """Returns the config of the base: without adapters, LoRA, PERFT, NF4 and `frozen_base`.

    A layer with adapter experts (PESC) becomes dense again, with the FFN that they share, unless these experts belong
    to the base. A config without any of these is returned equal, with `frozen_base` off.

    Args:
      config: config of the tuned model.
      keep_nf4: whether NF4 kernels stay NF4. The result then computes what the tuned model does before training.
    """
    layers = tuple(_base_layer(layer, keep_nf4) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, frozen_base=False)


def as_base(config: ModelConfig) -> ModelConfig:
    """Returns the config with adapter experts (PESC) as part of the model, so that other adapters can have it as base.

    The config of a model with a frozen base is returned unchanged: its adapters are not part of that base.
    """
    if config.frozen_base:
        return config
    return dataclasses.replace(config, layers=tuple(with_of_base(layer, True) for layer in config.layers))


def is_tuned(config: ModelConfig) -> bool:
    """Whether the model has adapters, LoRA or NF4 kernels."""
    plain = tuple(with_of_base(layer, False) for layer in config.layers)
    return base_config(config).layers != plain


def with_nf4(config: ModelConfig, nf4: bool) -> ModelConfig:
    """Returns the config with the kernels of attention, FFNs, shared bases and full experts in NF4, or none in NF4.

    Embeddings, head, norms, routers, biases and adapters are never NF4, and a shared base in other codes keeps those.
    """

    def layer_with(layer: LayerConfig) -> LayerConfig:
        mlp = layer.mlp
        if not isinstance(mlp, MoEConfig):
            mlp = dataclasses.replace(mlp, nf4=nf4)
        elif mlp.bank.has_linear_maps and mlp.bank.base_codes is None:
            mlp = dataclasses.replace(mlp, expert=dataclasses.replace(mlp.expert, nf4=nf4))
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, nf4=nf4), mlp=mlp)

    return dataclasses.replace(config, layers=tuple(map(layer_with, config.layers)))


def base_leaf(config: ModelConfig, path: str) -> str | None:
    """Returns the leaf of the base that a leaf of a tuned model equals or is made from; None for a new leaf.

    All leaves of an NF4 kernel are made from the same kernel:

        layers/3/attention/q/kernel                  -> layers/3/attention/q/kernel
        layers/3/attention/q/nf4/scales              -> layers/3/attention/q/kernel
        layers/3/mlp/experts/base/up/kernel  (PESC)  -> layers/3/mlp/up/kernel
        layers/3/attention/q/lora/a                  -> None

    Args:
      config: config of the tuned model.
      path: path of a leaf that it describes.
    """
    if "/lora/" in path or "/perft/" in path:
        return None
    path = kernel_of(path) or path
    match = _LAYER.fullmatch(path)
    if not match or not _is_pesc(config.layers[int(match[1])]):
        return path
    below = match[2]
    if not below.startswith(_PESC_BASE):
        return None
    return f"layers/{match[1]}/mlp/{below.removeprefix(_PESC_BASE)}"


def kernel_of(path: str) -> str | None:
    """Returns the path of the kernel that an NF4 leaf belongs to; None for any other leaf."""
    match = _NF4.fullmatch(path)
    return f"{match[1]}/kernel" if match else None


def own_leaves(config: ModelConfig) -> frozenset[str]:
    """Returns the paths of leaves that the base does not have: adapters, LoRA, and routers that choose adapters."""
    return frozenset(path for path in leaf_specs(config) if base_leaf(config, path) is None)


def _base_layer(layer: LayerConfig, keep_nf4: bool) -> LayerConfig:
    def plain(part: Any) -> Any:
        return dataclasses.replace(part, nf4=part.nf4 and keep_nf4, lora=None)

    attention, mlp = plain(layer.attention), layer.mlp
    if not isinstance(mlp, MoEConfig):
        return dataclasses.replace(layer, attention=attention, mlp=plain(mlp))
    if _is_pesc(layer):
        return dataclasses.replace(layer, attention=attention, mlp=plain(mlp.expert))
    below = dataclasses.replace(mlp, expert=plain(mlp.expert), perft=None, router_lora=None)
    return with_of_base(dataclasses.replace(layer, attention=attention, mlp=below), False)


def _is_pesc(layer: LayerConfig) -> bool:
    """Whether the experts are adapters after an FFN of the base."""
    return isinstance(layer.mlp, MoEConfig) and layer.mlp.bank.form.beside_base_model


def with_of_base(layer: LayerConfig, of_base: bool) -> LayerConfig:
    """Returns the layer with its adapter experts, if any, as part of the base or as adapters over it."""
    if not isinstance(layer.mlp, MoEConfig) or not isinstance(layer.mlp.bank.form, BesideBase):
        return layer
    bank = dataclasses.replace(layer.mlp.bank, form=layer.mlp.bank.form.as_part_of_base(of_base))
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, bank=bank))
