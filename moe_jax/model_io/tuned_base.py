"""A tuned model and its base: whose leaves are whose, and a source that reads both."""

import dataclasses
import re
from functools import cached_property
from typing import Any

import jax
import numpy as np

from moe_jax.checkpoints.zarr_arrays import Part
from moe_jax.core.finite import check_finite
from moe_jax.experts.forms.protocol import BesideBase
from moe_jax.functional.codes import quantize_nf4
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource, StoredLeaves, read_part
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig

_LAYER = re.compile(r"layers/(\d+)/mlp/(.*)")
_NF4 = re.compile(r"(.*)/nf4/([^/]+)")
_PESC_BASE = "experts/base/"


def base_config(config: ModelConfig, *, keep_nf4: bool = False) -> ModelConfig:
    """Returns the config of the base: without adapters, LoRA, PERFT, NF4 and `frozen_base`.

    A layer with adapter experts (PESC) becomes dense again, with the FFN that they share, unless these experts belong
    to the base. A config without any of these is returned equal, with `frozen_base` off. With `keep_nf4`, NF4 kernels
    stay NF4: the result then computes what the tuned model does before training.
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

    Embeddings, head, norms, routers, biases and adapters are never NF4, and what is in other codes keeps those.
    """

    def layer_with(layer: LayerConfig) -> LayerConfig:
        mlp, coded = layer.mlp, {path.partition("/")[0] for one in layer.codes for path in one.paths}
        if not isinstance(mlp, MoEConfig):
            mlp = dataclasses.replace(mlp, nf4=nf4 and "mlp" not in coded)
        elif mlp.bank.has_linear_maps and mlp.bank.base_codes is None:
            mlp = dataclasses.replace(mlp, expert=dataclasses.replace(mlp.expert, nf4=nf4))
        attention = dataclasses.replace(layer.attention, nf4=nf4 and "attention" not in coded)
        return dataclasses.replace(layer, attention=attention, mlp=mlp)

    return dataclasses.replace(config, layers=tuple(map(layer_with, config.layers)))


def base_leaf(config: ModelConfig, path: str) -> str | None:
    """Returns the leaf of the base that a leaf of a tuned model equals or is made from; None for a new leaf.

    All leaves of an NF4 kernel are made from the same kernel:

        layers/3/attention/q/kernel                  -> layers/3/attention/q/kernel
        layers/3/attention/q/nf4/scales              -> layers/3/attention/q/kernel
        layers/3/mlp/experts/base/up/kernel  (PESC)  -> layers/3/mlp/up/kernel
        layers/3/attention/q/lora/a                  -> None
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


class LeavesOverBase:
    """Reads leaves by their paths in the tuned model, one at a time.

    The model's own leaves are read as stored. Others are read from the base, and quantised if they are NF4: once per
    kernel, after which its small leaves (scales) are kept in memory until they are read.
    """

    def __init__(self, config: ModelConfig, base: ModelSource, own: StoredLeaves | None = None):
        """Compares the leaves on both sides; no weights are read. `own` are the model's own leaves, if it has some."""
        self._config = config
        self._base = base
        self._own = own
        self._waiting: dict[str, np.ndarray] = {}

    @property
    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns leaf path -> shape and dtype as stored, or as made for NF4 leaves; without leaves on neither side."""
        return self._specs

    @cached_property
    def _specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        base, specs = self._base.specs(), {}
        for path, spec in leaf_specs(self._config).items():
            source = base_leaf(self._config, path)
            own = self._own_leaves(path)
            if own is not None:
                specs[path] = own.specs[path]
            elif source in base:
                specs[path] = base[source] if kernel_of(path) is None else spec
        return specs

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf; raises `InputError` if neither side has it, or it is to be quantised and not finite."""
        own = self._own_leaves(path)
        if own is not None:
            return own.read(path)
        source = base_leaf(self._config, path)
        if source is None:
            assert self._own is not None, path
            return self._own.read(path)  # raises an error that names what is missing
        if kernel_of(path) is None:
            return self._base.read(source)
        if path not in self._waiting:
            self._quantize(source, path.rsplit("/", 1)[0])
        return self._waiting.pop(path)

    def read_part(self, path: str, part: Part) -> np.ndarray:
        """Reads a box of a leaf; if the leaf has to be quantised, all of it is made."""
        own = self._own_leaves(path)
        if own is not None:
            return read_part(own, path, part)
        source = base_leaf(self._config, path)
        if source is not None and kernel_of(path) is None:
            return read_part(self._base, source, part)
        return self.read(path)[part]

    def stored_bytes(self, path: str) -> int:
        """Returns the bytes of a leaf as stored. The codes of an NF4 kernel count as the kernel in the base."""
        own = self._own_leaves(path)
        if own is not None:
            return own.stored_bytes(path)
        source = base_leaf(self._config, path)
        made = kernel_of(path) is not None and not path.endswith("/codes")
        return 0 if made or source is None else self._base.stored_bytes(source)

    def _own_leaves(self, path: str) -> StoredLeaves | None:
        """Returns the model's own leaves if the path is one of them, else None."""
        return self._own if self._own is not None and path in self._own.specs else None

    def _quantize(self, kernel: str, folder: str) -> None:
        """Quantises a kernel; raises `InputError` if it, or the mean of its blocks' scales, is not finite."""
        values = self._base.read(kernel)
        check_finite(kernel, values, "NF4 has no code for them; mend the base, or leave it as it is stored")
        with jax.default_device(host_cpu()):
            leaves = quantize_nf4(values)
        for name, leaf in leaves.items():
            check_finite(f"{folder}/{name}", np.asarray(leaf), f"the numbers of {kernel} are too large for NF4")
        # Codes are large, so those of only one kernel are kept.
        waiting = {path: leaf for path, leaf in self._waiting.items() if not path.endswith("/codes")}
        self._waiting = waiting | {f"{folder}/{name}": np.asarray(leaf) for name, leaf in leaves.items()}


def host_cpu() -> Any:
    """Returns the host's CPU, which computes the same with every accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names an accelerator only
        return jax.local_devices()[0]
