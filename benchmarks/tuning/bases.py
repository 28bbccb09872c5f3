"""The MoEs that are tuned in the second part: stories260K, upcycled and trained. There is one for every seed."""

import time
from pathlib import Path

import numpy as np

from moe_jax.models import ModelConfig
from moe_jax.upcycle import upcycled_config
from tuning.kinds import vanilla_options
from tuning.models import Leaves, grown, leaves_of, model_of
from tuning.results import Results
from tuning.task import Task
from tuning.trainer import Trainer


def base_config(task: Task) -> ModelConfig:
    """Vanilla copies of the FFNs in every layer."""
    return upcycled_config(task.dense.config, vanilla_options(task.settings))


def load_base(task: Task, seed: int) -> Leaves:
    """The trained MoE of a seed; it must be there."""
    with np.load(_file(task, seed)) as leaves:
        return Leaves(base_config(task), dict(leaves))


def train_bases(task: Task, results: Results, domains: tuple[str, ...]) -> None:
    """Trains the MoEs that are not there yet, and scores them on the domains."""
    settings, config = task.settings, base_config(task)
    trainer = Trainer(config, steps=settings.base_steps, warmup_steps=settings.warmup_steps)
    for seed in task.seeds:
        file = _file(task, seed)
        if not file.exists():
            started = time.monotonic()
            start = model_of(grown(config, task.dense, seed))
            trained = trainer.run(start, task.batches("base", seed), seed=seed, peak=settings.base_rate)
            file.parent.mkdir(exist_ok=True)
            partial = file.with_suffix(".partial.npz")
            np.savez(partial, **leaves_of(trained.model).leaves)
            partial.replace(file)
            print(f"base, seed {seed}: {settings.base_steps} steps in {time.monotonic() - started:.0f} s", flush=True)
        model = model_of(load_base(task, seed))
        for name in ("shakespeare", *domains):
            if results.get("bases", str(seed), "held_out", name) is None:
                loss = trainer.score(model, task.scored(name).held_out, settings.seq_len)
                results.put("bases", str(seed), "held_out", name, value=loss)
                print(f"base, seed {seed}: held-out loss of {name} {loss:.4f}", flush=True)


def _file(task: Task, seed: int) -> Path:
    settings = task.settings
    shape = f"{settings.num_experts}x{settings.top_k}-{settings.base_steps}x{settings.base_batch_size}"
    return task.work / "bases" / f"{shape}x{settings.seq_len}-{settings.base_rate:g}-s{seed}.npz"
