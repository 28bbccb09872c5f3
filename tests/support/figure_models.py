"""Models on disk with experts of every kind, and these experts made the plain way."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from moe_jax.functional.codes import dequantize
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter
from moe_jax.models import BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.training_models import ATTENTION, config_of

BANKS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=2),
    "sparse": BankConfig(kind="sparse", rate=0.8),
    "quantized": BankConfig(kind="quantized", bits=2, group_size=8),
}
EXPERTS = 4


def moe_config(*banks: BankConfig | None, **moe) -> ModelConfig:
    """One layer per bank; None makes a dense one."""
    expert = FFNConfig(dim=40)
    layers = tuple(
        LayerConfig(
            attention=ATTENTION,
            mlp=expert if bank is None else MoEConfig(expert=expert, num_experts=EXPERTS, top_k=2, bank=bank, **moe),
        )
        for bank in banks
    )
    return dataclasses.replace(config_of(expert), layers=layers)


def write_model(folder: Path, config: ModelConfig) -> ModelDirectory:
    """A model directory of random numbers."""
    random = np.random.default_rng(0)
    folder.mkdir()
    tokenizer = byte_tokenizer(folder / "tokenizer.json")
    specs = leaf_specs(config)
    leaves: dict[str, np.ndarray] = {}
    for path, spec in specs.items():
        if path.endswith("/columns"):
            ends = path.replace("/columns", "/row_ends")
            base = specs[path.replace("/delta/", "/base/").replace("/columns", "/kernel")]
            drawn = [np.sort(random.choice(base.size, spec.shape[1], replace=False)) for _ in range(spec.shape[0])]
            leaves[path] = np.array([positions % base.shape[1] for positions in drawn], spec.dtype)
            counts = [np.bincount(positions // base.shape[1], minlength=base.shape[0]) for positions in drawn]
            leaves[ends] = np.cumsum(counts, axis=1).astype(specs[ends].dtype)
        elif path.endswith("/codes"):
            leaves[path] = random.integers(0, 256, spec.shape).astype(np.uint8)
        elif not path.endswith("/row_ends"):
            leaves[path] = (random.normal(size=spec.shape) * 0.1 + ("norm" in path)).astype(spec.dtype)
    with ModelDirectoryWriter(folder / "model", config, tokenizer_files=(tokenizer,), lineage=[]) as writer:
        writer.write(leaves)
    return ModelDirectory(folder / "model")


def experts_of(source: ModelDirectory, layer: int, name: str) -> np.ndarray:
    """All experts, [E, in, out] in float64."""
    bank, at = source.config.layers[layer].mlp.bank, f"layers/{layer}/mlp/experts"
    if bank.kind == "full":
        return source.read(f"{at}/{name}/kernel").astype(np.float64)
    base = source.read(f"{at}/base/{name}/kernel").astype(np.float64)

    def leaf(which: str) -> np.ndarray:
        return source.read(f"{at}/delta/{name}/{which}")

    if bank.kind == "low-rank":
        return base + np.einsum("eir,ero->eio", leaf("a").astype(np.float64), leaf("b"))
    if bank.kind == "quantized":
        form = bank.form
        deltas = [
            dequantize(jnp.asarray(codes), jnp.asarray(scales), len(base), form.bits, form.group_size, jnp.float32)
            for codes, scales in zip(leaf("codes"), leaf("scales"), strict=True)
        ]
        return base + np.array(deltas, np.float64)
    experts = np.repeat(base[None], EXPERTS, axis=0)
    for expert, (columns, ends, values) in enumerate(
        zip(leaf("columns"), leaf("row_ends"), leaf("values"), strict=True)
    ):
        starts = [0, *ends[:-1]]
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for column, value in zip(columns[start:end], values[start:end], strict=True):
                experts[expert, row, column] += value
    return experts
