"""A tuned model and its base: what the base's config is, and under which names its leaves go on.

A *tuned* model has adapters, LoRA or NF4 kernels; its base has none of them and is a model of its own. Paths are those
of a model directory.
"""

import dataclasses
import re
from typing import Any

from moe_jax.loading import leaf_specs
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig

_LAYER = re.compile(r"layers/(\d+)/mlp/(.*)")
_NF4 = re.compile(r"(.*)/nf4/([^/]+)")
_PESC_BASE = "experts/base/"


def base_config(config: ModelConfig, *, keep_nf4: bool = False) -> ModelConfig:
    """The config of the model below: without adapters, LoRA, PERFT, NF4 and `frozen_base`.

    Of adapter experts (PESC) the FFN that they share is left, and their layer is dense again, unless they belong to the
    base themselves. A config that has none
    of these comes back equal, except that `frozen_base` is off.

    Args:
      config: of the tuned model.
      keep_nf4: kernels that are kept as NF4 stay so: what the tuned model computes before it is trained.
    """
    layers = tuple(_base_layer(layer, keep_nf4) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, frozen_base=False)


def as_base(config: ModelConfig) -> ModelConfig:
    """The same model with adapter experts (PESC) that belong to it, to be a base for others.

    A model with a frozen base comes back as it is: its adapters belong to that base.
    """
    if config.frozen_base:
        return config
    return dataclasses.replace(config, layers=tuple(with_of_base(layer, True) for layer in config.layers))


def is_tuned(config: ModelConfig) -> bool:
    """Whether there is anything beside a base, or a kernel kept as NF4."""
    plain = tuple(with_of_base(layer, False) for layer in config.layers)
    return base_config(config).layers != plain


def with_nf4(config: ModelConfig, nf4: bool) -> ModelConfig:
    """The same model with the kernels of attention, FFNs, shared bases and full experts as NF4 codes, or plain.

    Embeddings, head, norms, routers and everything small stay as they are.
    """

    def layer_with(layer: LayerConfig) -> LayerConfig:
        mlp = layer.mlp
        if not isinstance(mlp, MoEConfig):
            mlp = dataclasses.replace(mlp, nf4=nf4)
        elif mlp.bank.has_kernels:
            mlp = dataclasses.replace(mlp, expert=dataclasses.replace(mlp.expert, nf4=nf4))
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, nf4=nf4), mlp=mlp)

    return dataclasses.replace(config, layers=tuple(map(layer_with, config.layers)))


def base_leaf(config: ModelConfig, path: str) -> str | None:
    """The leaf of the base that a leaf of a tuned model is, or is made from; None for one that is new.

    All leaves of an NF4 kernel are made from the one kernel:

        layers/3/attention/q/kernel                  -> layers/3/attention/q/kernel
        layers/3/attention/q/nf4/scales              -> layers/3/attention/q/kernel
        layers/3/mlp/experts/base/up/kernel  (PESC)  -> layers/3/mlp/up/kernel
        layers/3/attention/q/lora/a                  -> None

    Args:
      config: of the tuned model.
      path: of a leaf that it describes.
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
    """The path of the kernel that a leaf of NF4 belongs to; None for any other leaf."""
    match = _NF4.fullmatch(path)
    return f"{match[1]}/kernel" if match else None


def own_leaves(config: ModelConfig) -> frozenset[str]:
    """Paths of the leaves that the base does not have: adapters, LoRA, and routers that choose among adapters."""
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
    """Whether the experts are adapters that stand after what the base has."""
    return isinstance(layer.mlp, MoEConfig) and layer.mlp.bank.kind == "adapter" and not layer.mlp.bank.adapter.of_base


def with_of_base(layer: LayerConfig, of_base: bool) -> LayerConfig:
    """The layer with adapter experts, where it has any, that are the base's or stand beside it."""
    if not isinstance(layer.mlp, MoEConfig) or layer.mlp.bank.adapter is None:
        return layer
    adapter = dataclasses.replace(layer.mlp.bank.adapter, of_base=of_base)
    bank = dataclasses.replace(layer.mlp.bank, adapter=adapter)
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, bank=bank))
