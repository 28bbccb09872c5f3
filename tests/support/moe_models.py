"""MoE models that seem trained: experts that differ a little, in directories and in memory."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.commands import cli
from moe_jax.experts.forms import ffn_matrices
from moe_jax.experts.on_host import expert_kernels
from moe_jax.model_io.loading import leaf_specs, load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig, ModelConfig, MoEConfig
from moe_jax.upcycling.expert_leaves import moe_leaves
from tests.support.dense_models import dense_config, random_leaves
from tests.support.numerics import logits_of

EXPERTS = 3


# Two steps of training on `text` for the model `out`.
RECIPE = """
run_dir = "{folder}/run"
[model]
path = "{folder}/out"
[data]
seq_len = 16
sources = [{{ path = "{folder}/text.txt" }}]
[optimizer]
learning_rate = 1e-3
[train]
steps = 2
batch_size = 8
"""


class MemorySource:
    """A `ModelSource` of arrays."""

    lineage = ()
    base = None

    def __init__(self, config: ModelConfig, leaves: dict[str, np.ndarray]):
        self.config = config
        self.leaves = leaves
        self.path = Path("in-memory")
        self.tokenizer_files = ()

    def specs(self):
        return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in self.leaves.items()}

    def read(self, path):
        return self.leaves[path]

    def stored_bytes(self, path):
        return self.leaves[path].nbytes

    def fingerprint(self):
        return "of arrays"


def moe_config(dense: ModelConfig, *banks: BankConfig | None, **moe) -> ModelConfig:
    """`dense` with an MoE of the given bank in some layers; None leaves a layer dense."""
    moe = {"num_experts": EXPERTS, "top_k": 2, **moe}
    layers = tuple(
        layer if bank is None else dataclasses.replace(layer, mlp=MoEConfig(expert=layer.mlp, bank=bank, **moe))
        for layer, bank in zip(dense.layers, banks, strict=True)
    )
    return dataclasses.replace(dense, layers=layers)


def trained_leaves(config: ModelConfig, dense: dict[str, np.ndarray], *, noise: float = 0.1) -> dict[str, np.ndarray]:
    """Leaves of an MoE upcycled from `dense`, after something like training: everything in the MoE layers has moved."""
    random = np.random.default_rng(1)
    leaves = {path: leaf for path, leaf in dense.items() if path in leaf_specs(config)}
    for i in config.moe_layers:
        prefix = f"layers/{i}/mlp/"
        ffn = {path.removeprefix(prefix): leaf for path, leaf in dense.items() if path.startswith(prefix)}
        for name, leaf in moe_leaves(ffn, config.layers[i].mlp, layer=i):
            moved = leaf
            if leaf.dtype.kind not in "iu":
                moved = leaf.astype(np.float32) + noise * random.standard_normal(leaf.shape).astype(np.float32)
            leaves[prefix + name] = moved.astype(leaf.dtype)
    return leaves


def memory_moe(*banks: BankConfig | None, noise=0.1, dtype=None, shape=None, **moe) -> MemorySource:
    """An MoE in memory, one layer per bank."""
    dense = dense_config(num_layers=len(banks), **(shape or {}))
    config = moe_config(dense, *banks, **moe)
    return MemorySource(config, trained_leaves(config, random_leaves(dense, dtype=dtype), noise=noise))


def same_weights(one: Path, other: Path) -> bool:
    """Whether two model directories hold the same bits."""
    a, b = ModelDirectory(one), ModelDirectory(other)
    return (
        a.config == b.config
        and a.specs() == b.specs()
        and all(a.read(path).tobytes() == b.read(path).tobytes() for path in a.specs())
    )


def check_merged(small: ModelDirectory, config: ModelConfig, leaves: dict[str, np.ndarray]) -> None:
    """A compressed model gives the same as one with these leaves, the kernels of experts merged."""
    for i in small.config.moe_layers:
        moe = small.config.moe(i)
        for name, matrix in ffn_matrices(moe.expert, small.config.d_model).items():
            kernels = expert_kernels(small.read, moe.bank, f"layers/{i}/mlp/experts", matrix)
            leaves[f"layers/{i}/mlp/experts/{name}/kernel"] = np.stack(list(kernels))
    tokens = jnp.asarray([[1, 2, 3]])
    whole = load_model(MemorySource(config, leaves))
    np.testing.assert_allclose(logits_of(load_model(small), tokens), logits_of(whole, tokens), atol=1e-5)


def run(*arguments) -> int:
    return cli.main(["compress", *map(str, arguments)])
