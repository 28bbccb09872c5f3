"""Models between jobs: leaves in memory, made by the library's own rules, and model directories that are kept."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import leaf_specs, load_model, model_leaves
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import LeavesOverBase, is_tuned
from moe_jax.models import ModelConfig, MoEConfig
from moe_jax.nn import Decoder
from moe_jax.peft.adapt import initial_leaves
from moe_jax.upcycling import UpcycleSpec, moe_leaves


class Leaves:
    """A model source whose leaves lie in memory, by their paths in a model directory."""

    path = Path("in memory")
    tokenizer_files: tuple[Path, ...] = ()

    def __init__(self, config: ModelConfig, leaves: Mapping[str, np.ndarray]):
        """Takes the leaves as they are."""
        self.config = config
        self.leaves = dict(leaves)

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


def read_leaves(source: ModelSource) -> Leaves:
    """All leaves of a model."""
    return Leaves(source.config, {path: np.asarray(source.read(path)) for path in source.specs()})


def model_of(leaves: Leaves) -> Decoder:
    """The model that consists of leaves."""
    return load_model(leaves)


def keep(model: Decoder, folder: Path, tokenizer_files: Sequence[Path]) -> None:
    """Writes a model directory; what is not complete does not stay."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lineage = [new_lineage_entry("train", {}, [])]
    with ModelDirectoryWriter(folder, model.config, tokenizer_files=tokenizer_files, lineage=lineage) as writer:
        for path, leaf in model_leaves(model):
            writer.write({path: np.asarray(leaf)})


def grown(
    config: ModelConfig,
    base: Leaves,
    *,
    spec: UpcycleSpec = UpcycleSpec(),
    branches: Sequence[Leaves] = (),
    routers: Mapping[int, np.ndarray] | None = None,
) -> Leaves:
    """What a base becomes.

    Args:
      config: the base's own, that of an MoE made of it, or of the base with adapters, LoRA, PERFT or NF4.
      base: all its leaves.
      spec: what is done to the copies of FFNs that become experts, and the seed of the leaves that the base has not.
      branches: the models that experts are from, one each, in place of the base.
      routers: the first router of every new MoE layer, float32[d, E]; None: drawn.
    """
    if is_tuned(config):
        own = Leaves(config, dict(initial_leaves(config, spec.seed)))
        over = LeavesOverBase(config, base, _Own(own))
        return Leaves(config, {path: over.read(path) for path in leaf_specs(config)})
    leaves = dict(base.leaves)
    for index, (layer, before) in enumerate(zip(config.layers, base.config.layers, strict=True)):
        if not isinstance(layer.mlp, MoEConfig) or isinstance(before.mlp, MoEConfig):
            continue
        prefix = f"layers/{index}/mlp/"
        ffn, *others = (_below(model.leaves, prefix) for model in (base, *branches))
        made = moe_leaves(ffn, layer.mlp, spec, layer=index, branches=others, router=(routers or {}).get(index))
        leaves = {path: leaf for path, leaf in leaves.items() if not path.startswith(prefix)}
        leaves |= {prefix + path: leaf for path, leaf in made}
    if branches:
        # As `upcycle --experts-from` does: what is no expert is the mean over the models.
        shared = [path for path in leaves if path in branches[0].leaves]
        leaves |= {path: np.mean([model.leaves[path] for model in branches], axis=0) for path in shared}
    return Leaves(config, leaves)


def _below(leaves: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {path.removeprefix(prefix): leaf for path, leaf in leaves.items() if path.startswith(prefix)}
