"""A model seen as foreign formats can hold it: every bank full, and every layer an MoE if one is.

Merging is a view. Experts are made one at a time while they are written, never as a whole layer.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np

from moe_jax.convert.families import family_named
from moe_jax.errors import InputError
from moe_jax.experts.materialise import expert_kernels
from moe_jax.loading import check_leaves, leaf_specs
from moe_jax.model_source import ModelSource
from moe_jax.models import BankConfig, LayerConfig, ModelConfig, MoEConfig


def merged_config(config: ModelConfig, *, replicate_dense: bool) -> ModelConfig:
    """The config of a model after merging, in the family whose format can hold it.

    A dense model is left as it is. The deltas of a model with MoE layers are merged; if its family has no MoE
    layers it moves to its `moe_format`, and there every dense layer becomes an MoE of equal experts.

    Args:
      config: of the model.
      replicate_dense: whether dense layers may become MoEs.

    Raises:
      InputError: if no format holds the model.
    """
    if not config.moe_layers:
        return config
    if any(config.layers[i].mlp.universal != "none" for i in config.moe_layers):
        raise InputError(
            "a model with a universal FFN has no Hugging Face format that would give the same logits; keep it as a "
            "model directory"
        )
    family = family_named(config.family)
    layers = [_full(layer) for layer in config.layers]
    foreign = dict(config.foreign)
    if family.holds_experts:
        return replace(config, layers=tuple(layers))
    if family.moe_format is None:
        raise InputError(
            f"a {family.name!r} model with MoE layers has no Hugging Face format that would give the same logits; "
            "keep it as a model directory"
        )
    # Code that belongs to the old format must not be run for the new one.
    foreign.pop("auto_map", None)
    dense = [i for i, layer in enumerate(layers) if not isinstance(layer.mlp, MoEConfig)]
    if dense and not replicate_dense:
        raise InputError(
            f"the format of {family.moe_format!r} needs an MoE in every layer, but {len(dense)} of {len(layers)} "
            "are dense; --dense-layers replicate stores such a layer as equal experts, with the same logits"
        )
    like = layers[config.moe_layers[0]].mlp
    for i in dense:
        if layers[i].mlp != like.expert:
            raise InputError(
                f"layer {i} has the FFN {layers[i].mlp}, the experts are {like.expert}; "
                f"the format of {family.moe_format!r} has one size for both"
            )
        layers[i] = replace(layers[i], mlp=like)
    return replace(config, family=family.moe_format, layers=tuple(layers), foreign=foreign)


class MergedModel:
    """The leaves of a source as `merged_config` describes them."""

    def __init__(self, source: ModelSource, config: ModelConfig):
        """Looks at what the source holds; no weights are read.

        Args:
          source: to read from.
          config: as `merged_config` returned it for the source's.

        Raises:
          InputError: if the source does not hold the leaves that its own config describes.
        """
        self.config = config
        self._source = source
        self._stored = source.specs()
        check_leaves(leaf_specs(source.config), self._stored, str(source.path))
        self._shapes = {path: spec.shape for path, spec in leaf_specs(config).items()}

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Leaf path -> shape, and the dtype of what it is made from."""
        return {path: jax.ShapeDtypeStruct(shape, self._dtype(path)) for path, shape in self._shapes.items()}

    def parts(self, path: str) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yields (None, leaf), or for experts (e, leaf[e]) one expert after another.

        Shapes and dtypes are those of `specs`; deltas are added in float32.
        """
        if "/experts/" not in path:
            yield None, self._router(path) if path not in self._stored else self._source.read(path)
        elif path in self._stored:
            leaf = self._source.read(path)
            for expert in range(leaf.shape[0]):
                yield expert, leaf[expert]
        else:
            yield from self._merged(path)

    def _merged(self, path: str) -> Iterator[tuple[int, np.ndarray]]:
        """Experts that are stored as something else than full kernels."""
        block, _, name = path.partition("/experts/")
        layer = self._layer(path)
        if not isinstance(layer.mlp, MoEConfig):
            base = self._source.read(self._base(path))
            for expert in range(self._num_experts(path)):
                yield expert, base
            return
        bank, matrix = f"{block}/experts", name.removesuffix("/kernel")
        shape = layer.mlp.expert.shapes(self.config.d_model)[matrix]
        yield from enumerate(expert_kernels(self._source.read, layer.mlp.bank, bank, matrix, shape))

    def _router(self, path: str) -> np.ndarray:
        """The router of a layer that was dense: all experts are equal, so any router will do."""
        return np.zeros(self._shapes[path], self._dtype(path))

    def _dtype(self, path: str) -> np.dtype:
        if path in self._stored:
            return np.dtype(self._stored[path].dtype)
        if "/experts/" in path:
            return np.dtype(self._stored[self._base(path)].dtype)
        # Only the router of a layer that was dense is stored nowhere; it is like the layer's norm.
        return np.dtype(self._stored[path.replace("/mlp/router/kernel", "/mlp_norm/scale")].dtype)

    def _base(self, path: str) -> str:
        """The stored leaf an expert kernel is made from: the shared base, or the kernel of a dense layer."""
        dense = path.replace("/experts/", "/")
        return dense if dense in self._stored else path.replace("/experts/", "/experts/base/")

    def _layer(self, path: str) -> LayerConfig:
        return self._source.config.layers[int(path.split("/")[1])]

    def _num_experts(self, path: str) -> int:
        return self.config.layers[int(path.split("/")[1])].mlp.num_experts


def _full(layer: LayerConfig) -> LayerConfig:
    return replace(layer, mlp=replace(layer.mlp, bank=BankConfig())) if isinstance(layer.mlp, MoEConfig) else layer
