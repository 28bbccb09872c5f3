"""Models in memory, made by the library's own rules from the leaves of others."""

from pathlib import Path

import jax
import numpy as np

from moe_jax.loading import leaf_specs, load_model, model_leaves
from moe_jax.models import ModelConfig, MoEConfig
from moe_jax.nn import Decoder
from moe_jax.peft.base import is_tuned
from moe_jax.peft.initial import initial_leaves
from moe_jax.peft.over_base import LeavesOverBase
from moe_jax.upcycle import moe_leaves


class Leaves:
    """A model source whose leaves lie in memory, by their paths in a model directory."""

    path = Path("in memory")
    tokenizer_files: tuple[Path, ...] = ()

    def __init__(self, config: ModelConfig, leaves: dict[str, np.ndarray]):
        """Takes the leaves as they are."""
        self.config = config
        self.leaves = leaves

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Leaf path -> shape and dtype."""
        return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in self.leaves.items()}

    def read(self, path: str) -> np.ndarray:
        """One leaf."""
        return self.leaves[path]

    def stored_bytes(self, path: str) -> int:
        """What it would take on the disk."""
        return self.leaves[path].nbytes

    def fingerprint(self) -> str:
        """What lies in memory has no lineage."""
        return ""


class _Own:
    """The leaves of adapters, as `LeavesOverBase` takes them."""

    def __init__(self, leaves: Leaves):
        self.specs = leaves.specs()
        self.read, self.stored_bytes = leaves.read, leaves.stored_bytes


def leaves_of(model: Decoder) -> Leaves:
    """The leaves of a model."""
    return Leaves(model.config, {path: np.asarray(leaf) for path, leaf in model_leaves(model)})


def model_of(leaves: Leaves) -> Decoder:
    """The model that consists of leaves."""
    return load_model(leaves)


def grown(config: ModelConfig, base: Leaves, seed: int) -> Leaves:
    """What a base becomes.

    Args:
      config: the base's own, that of a vanilla MoE, or of the base with adapters, LoRA, PERFT or NF4.
      base: all its leaves.
      seed: of the leaves that the base has not.
    """
    if is_tuned(config):
        own = Leaves(config, dict(initial_leaves(config, seed)))
        over = LeavesOverBase(config, base, _Own(own))
        return Leaves(config, {path: over.read(path) for path in leaf_specs(config)})
    leaves = dict(base.leaves)
    for index, (layer, before) in enumerate(zip(config.layers, base.config.layers, strict=True)):
        if isinstance(layer.mlp, MoEConfig) and not isinstance(before.mlp, MoEConfig):
            prefix = f"layers/{index}/mlp/"
            ffn = {path.removeprefix(prefix): leaves.pop(path) for path in list(leaves) if path.startswith(prefix)}
            made = moe_leaves(ffn, layer.mlp, seed=seed, layer=index)
            leaves |= {prefix + path: leaf for path, leaf in made}
    return Leaves(config, leaves)
