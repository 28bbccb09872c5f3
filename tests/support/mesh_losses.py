"""Losses of the first steps of small models, on meshes of eight devices; also run as a program of several processes:

MOE_JAX_DISTRIBUTED=localhost:4000,2,0 python -m tests.support.mesh_losses '[["vanilla", {"fsdp": 8}]]'
"""

import dataclasses
import itertools
import json
import sys
import types
from typing import Any

import numpy as np

from moe_jax.distributed import processes
from moe_jax.experts.shapes import AdapterConfig
from moe_jax.models import BankConfig, ModelConfig, PerftConfig
from moe_jax.training.in_memory_training import train_on_batches
from moe_jax.training.recipe import MeshSection, ModelSection, OptimizerSection
from tests.support.training_models import BANKS, config_of, moe, recipe_of

STEPS = 3
ADAPTER = AdapterConfig(rank=2, activation="gelu")


def _kinds() -> dict[str, tuple[ModelConfig, str]]:
    """Models by kind, and how tokens come to experts."""
    beside = PerftConfig(variant="routed", adapter=ADAPTER, num_experts=4, top_k=2)
    return {
        "vanilla": (config_of(moe()), "auto"),
        "vanilla, all-to-all": (config_of(moe()), "all-to-all"),
        "DeRS-LM": (config_of(moe(BANKS["low-rank"])), "auto"),
        "DeRS-SM": (config_of(moe(BANKS["sparse"])), "auto"),
        "PESC": (config_of(moe(BankConfig(kind="adapter", adapter=ADAPTER)), frozen_base=True), "auto"),
        "PERFT": (config_of(moe(perft=beside), frozen_base=True), "auto"),
    }


KINDS = _kinds()
SHAPES = [
    dict(zip(("data", "fsdp", "expert", "tensor"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 4, 8), repeat=4)
    if np.prod(sizes) == 8
]


def losses(kind: str, axes: dict[str, int]) -> list[list[float]]:
    """Loss, auxiliary loss and norm of the gradient of some steps; every process makes this call."""
    config, exchange = KINDS[kind]
    recipe = recipe_of(
        steps=STEPS,
        model=ModelSection(config="config.json", init="random", exchange=exchange),
        optimizer=OptimizerSection(learning_rate=1e-2),
        mesh=MeshSection(**axes),
    )
    batch = np.random.default_rng(0).integers(0, 256, (recipe.train.batch_size, recipe.data.seq_len + 1))
    found: list[list[float]] = []
    source: Any = types.SimpleNamespace(config=dataclasses.replace(config))
    keys = ("loss", "aux_loss", "grad_norm")
    train_on_batches(recipe, source, [batch] * STEPS, on_step=lambda r: found.append([r[key] for key in keys]))
    return found


if __name__ == "__main__":
    processes.join_processes()
    print(json.dumps([losses(kind, axes) for kind, axes in json.loads(sys.argv[1])]))
    processes.leave_processes()
