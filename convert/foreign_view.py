"""A model in the form that foreign formats can store: full experts of equal width, dense layers where they may stay.

This is a view: experts are materialised one at a time while they are written, never a whole layer at once.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np

from moe_jax.convert.families import family_named
from moe_jax.convert.harmless_keys import is_harmless
from moe_jax.errors import InputError
from moe_jax.experts.forms import ffn_matrices
from moe_jax.experts.on_host import expert_kernels
from moe_jax.finite import cast
from moe_jax.loading import check_leaves, leaf_specs
from moe_jax.model_source import ModelSource
from moe_jax.models import BankConfig, LayerConfig, ModelConfig, MoEConfig


def merged_config(config: ModelConfig, *, replicate_dense: bool) -> ModelConfig:
    """The config of a model after merging, in the family whose format can hold it.

    A dense model is unchanged. In a model with MoE layers, deltas are merged into full experts. If its family has no
    MoE layers the model moves to the family's `moe_format`; if that has no dense layers, they become MoEs of equal
    experts. Merged experts are repeated, one for each output of the router. Narrower experts are padded to the largest
    width in any layer with zero neurons, which add nothing because act(0) = 0.

    Args:
      config: of the model.
      replicate_dense: whether dense layers may become MoEs.

    Raises:
      InputError: if no format holds the model.
    """
    if not config.moe_layers:
        return config
    if any(config.moe(i).universal != "none" for i in config.moe_layers):
        raise InputError(
            "a model with a universal FFN has no Hugging Face format that would give the same logits; keep it as a "
            "model directory"
        )
    family = family_named(config.family)
    widest = max(config.moe(i).expert.dim for i in config.moe_layers)
    if family.holds_experts:
        return replace(config, layers=tuple(_full(layer, widest) for layer in config.layers))
    if family.moe_format is None:
        raise InputError(
            f"a {family.name!r} model with MoE layers has no Hugging Face format that would give the same logits; "
            "keep it as a model directory"
        )
    # Keys of the old format could mean something in the new one; `auto_map` names code, which must not be run for it.
    foreign = {key: value for key, value in config.foreign.items() if is_harmless(key, value) and key != "auto_map"}
    dense = []
    if not family_named(family.moe_format).holds_dense_layers:
        dense = [i for i in range(config.num_layers) if i not in config.moe_layers]
    if dense and not replicate_dense:
        raise InputError(
            f"the format of {family.moe_format!r} needs an MoE in every layer, but {len(dense)} of {config.num_layers} "
            "are dense; --dense-layers replicate stores such a layer as equal experts, with the same logits"
        )
    widest = max([widest, *(config.ffn(i).dim for i in dense)])
    layers = [_full(layer, widest) for layer in config.layers]
    like = replace(config, layers=tuple(layers)).moe(config.moe_layers[0])
    for i in dense:
        if replace(config.ffn(i), dim=widest) != like.expert:
            raise InputError(
                f"layer {i} has the FFN {config.ffn(i)}, the experts are {like.expert}; "
                f"the format of {family.moe_format!r} has one kind for both"
            )
        layers[i] = replace(layers[i], mlp=like)
    return replace(config, family=family.moe_format, layers=tuple(layers), foreign=foreign)


class MergedModel:
    """The leaves of a source as `merged_config` describes them."""

    def __init__(self, source: ModelSource, config: ModelConfig):
        """Checks the leaves of the source; no weights are read.

        Args:
          source: to read from.
          config: from `merged_config`, for the config of the source.

        Raises:
          InputError: if the source does not hold the leaves that its own config describes.
        """
        self.config = config
        self._source = source
        self._stored = source.specs()
        check_leaves(leaf_specs(source.config), self._stored, str(source.path))
        self._shapes = {path: spec.shape for path, spec in leaf_specs(config).items()}

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Leaf path -> shape, and the dtype of the leaves that it is made from."""
        return {path: jax.ShapeDtypeStruct(shape, self._dtype(path)) for path, shape in self._shapes.items()}

    def parts(self, path: str) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yields (None, leaf); or for experts (e, leaf[e]) for every e, in the order of the bank.

        Shapes and dtypes are those of `specs`; deltas are added in float32.
        """
        if "/experts/" not in path:
            yield None, self._router(path) if path not in self._stored else self._source.read(path)
            return
        outputs, shape = self._outputs(path), self._shapes[path][1:]
        for expert, kernel in enumerate(self._bank(path)):
            kernel = _padded(kernel, shape)
            for output in outputs[expert]:
                yield output, kernel

    def _outputs(self, path: str) -> list[np.ndarray]:
        """The router outputs that each expert of the bank stands for; for the FFN of a dense layer, all of them."""
        mlp, outputs = self._layer(path).mlp, np.arange(self._shapes[path][0])
        if not isinstance(mlp, MoEConfig):
            return [outputs]
        if mlp.merged_experts is None:
            return list(outputs[:, None])
        groups = self._source.read(f"{path.partition('/experts/')[0]}/groups")
        return [np.flatnonzero(groups == group) for group in range(mlp.merged_experts)]

    def _bank(self, path: str) -> Iterator[np.ndarray]:
        """Yields the kernel or bias of every expert of the bank, as stored or materialised."""
        block, _, name = path.partition("/experts/")
        mlp = self._layer(path).mlp
        if not isinstance(mlp, MoEConfig):
            yield self._source.read(path.replace("/experts/", "/"))
        elif path in self._stored:
            yield from self._source.read(path)
        else:
            matrix = ffn_matrices(mlp.expert, self.config.d_model)[name.removesuffix("/kernel")]
            read, dtype = self._source.read, self._dtype(path)
            # Of float16 alone the range is so small that a sum of two may well lie outside.
            made = np.dtype(np.float32) if dtype == np.float16 else dtype
            for expert, kernel in enumerate(expert_kernels(read, mlp.bank, f"{block}/experts", matrix, dtype=made)):
                yield cast(f"{path}[{expert}]", kernel, dtype)

    def _router(self, path: str) -> np.ndarray:
        """A router for a layer that was dense. Its experts are equal, so any router will do."""
        return np.zeros(self._shapes[path], self._dtype(path))

    def _dtype(self, path: str) -> np.dtype:
        """The dtype of the leaf; else of the base or dense kernel that experts come from; else of the layer's norm."""
        dense, base = path.replace("/experts/", "/"), path.replace("/experts/", "/experts/base/")
        norm = f"{path.partition('/mlp/')[0]}/attention_norm/scale"
        return np.dtype(next(self._stored[leaf].dtype for leaf in (path, dense, base, norm) if leaf in self._stored))

    def _layer(self, path: str) -> LayerConfig:
        return self._source.config.layers[int(path.split("/")[1])]


def _full(layer: LayerConfig, width: int) -> LayerConfig:
    mlp = layer.mlp
    if not isinstance(mlp, MoEConfig):
        return layer
    return replace(
        layer, mlp=replace(mlp, bank=BankConfig(), merged_experts=None, expert=replace(mlp.expert, dim=width))
    )


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads every axis with zeros at its end."""
    if array.shape == shape:
        return array
    return np.pad(array, [(0, size - there) for size, there in zip(shape, array.shape, strict=True)])
