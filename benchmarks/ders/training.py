"""Trains every kind with every seed. A kind is compiled once and takes the seeds' parameters and batches in turn."""

import shutil
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from ders.results import Results
from ders.settings import KINDS, VANILLA, Kind, Settings
from moe_jax.counting import count_parameters
from moe_jax.model_source import ModelSource
from moe_jax.nn.router_stats import load_per_layer
from moe_jax.open_source import open_source
from moe_jax.train.data import open_data
from moe_jax.train.data_sections import DataSection, SourceSection
from moe_jax.train.evaluation import read_text
from moe_jax.train.placement import place
from moe_jax.train.program import first_state, initial_states, make_program
from moe_jax.train.recipe import ModelSection, OptimizerSection, Recipe, ScheduleSection, TrainSection
from moe_jax.train.run_directory import write_model
from moe_jax.train.tokenizer import Tokenizer, find_tokenizer
from moe_jax.upcycle import UpcycleOptions, parse_delta, upcycle
from quality.scoring import Scorer
from quality.text import split_text


class Task:
    """The dense model, its text, and where models are kept.

    Attributes:
      dense: stories260K.
      seeds: of the runs.
      settings: equal for every run.
      tokenizer: file of the tokenizer.
      held_out: Int32[n], the text that is scored.
    """

    def __init__(self, data: Path, work: Path, settings: Settings, seeds: Sequence[int]):
        self.dense = open_source(data / "weights" / "stories260K" / "hf")
        self.seeds = seeds
        self.settings = settings
        self.tokenizer = find_tokenizer(self.dense.tokenizer_files, self.dense.path)
        self._work = work
        work.mkdir(parents=True, exist_ok=True)
        self._train_text, held_out = split_text(data, work, settings.held_out_share)
        self.held_out = read_text(held_out, Tokenizer(self.tokenizer, self.dense.config))
        self.batches = cache(self._batches)

    def recipe(self, model: ModelSource, run_dir: Path, seed: int) -> Recipe:
        """The recipe that `moe-jax train` would be given."""
        settings = self.settings
        return Recipe(
            run_dir=str(run_dir),
            model=ModelSection(path=str(model.path)),
            seed=seed,
            data=DataSection(
                sources=(SourceSection(path=str(self._train_text)),),
                seq_len=settings.seq_len,
                # Short pieces in random order. With long ones a run ends on a few plays, and how near these are to the
                # held-out ones decides its loss: 0.13 nats between seeds, several times the differences between kinds.
                piece_kib=1,
                prefetch=0,
            ),
            optimizer=OptimizerSection(learning_rate=settings.learning_rate, weight_decay=settings.weight_decay),
            schedule=ScheduleSection(warmup_steps=settings.warmup_steps),
            train=TrainSection(steps=settings.steps, batch_size=settings.batch_size),
        )

    def _batches(self, seed: int) -> list[dict[str, np.ndarray]]:
        """All batches of a seed, the same for every kind."""
        rows = range(self.settings.batch_size)
        recipe = self.recipe(self.dense, self._work, seed)
        data = open_data(
            recipe.data, self.dense.config, self.tokenizer, seed=seed, batch_size=len(rows), rows=rows
        )
        return [next(data) for _ in range(self.settings.steps)]

    def upcycled(self, name: str, kind: Kind, seed: int) -> ModelSource:
        """The model that a run starts from."""
        if kind.delta is None:
            return self.dense
        folder = self._work / "upcycled"
        if folder.exists():
            shutil.rmtree(folder)
        settings = self.settings
        options = UpcycleOptions(
            num_experts=settings.num_experts,
            top_k=settings.top_k,
            every=settings.every,
            bank=parse_delta(kind.delta, freeze_base=kind.freeze_base),
            balance_coef=settings.balance_coef,
        )
        # `start_loss` is recorded for every run, which is the same check on more text.
        upcycle(self.dense, folder, options, seed=seed, check=False, described={"kind": name, "seed": seed})
        return open_source(folder)

    def vanilla(self, seed: int) -> Path:
        """Where the trained vanilla model of a seed is kept, in a folder that belongs to these settings."""
        settings = self.settings
        name = f"vanilla_{settings.steps}x{settings.batch_size}x{settings.seq_len}_{settings.learning_rate:g}_{seed}"
        return self._work / name / "model"


class Trainer:
    """The compiled programs of one kind."""

    def __init__(self, task: Task, model: ModelSource):
        self._task = task
        recipe = task.recipe(model, Path("unused"), seed=0)
        self._program = make_program(recipe, model.config, jax.devices()[:1])
        self._evaluator = Scorer(task.held_out, task.settings.seq_len).evaluator(self._program.graphdef)

    def run(self, model: ModelSource, seed: int, keep: Path | None) -> dict[str, Any]:
        """Trains from a model.

        Args:
          model: as upcycled with the seed.
          seed: decides the batches.
          keep: where the trained model is written; None: nowhere.

        Returns:
          Held-out losses before and after, the training loss, and the expert load of the last batch per layer.
        """
        task, program, size = self._task, self._program, self._task.settings.batch_size
        rows = list(range(size))
        started = time.monotonic()
        run_dir = Path("unused") if keep is None else keep.parent
        recipe = task.recipe(model, run_dir, seed)
        with jax.set_mesh(program.mesh):
            params, frozen = initial_states(program, recipe, model)
            start = self._evaluator(params, frozen).nll
            trained = sum(leaf.size for leaf in jax.tree.leaves(params))
            state = first_state(program, params)
            losses = []
            for batch in task.batches(seed):
                state, metrics = program.step(state, frozen, place(batch, rows, program.mesh, size))
                losses.append(float(metrics.loss))
        loads = load_per_layer(program.config, metrics.router)
        result = {
            "loss": self._evaluator(state.params, frozen).nll,
            "start_loss": start,
            "train_loss": float(np.mean(losses[-25:])),
            "train_losses": [round(loss, 4) for loss in losses],
            "trained_params": trained,
            "params": count_parameters(model.specs().values()),
            "last_batch_load": {str(layer): np.asarray(load).round(4).tolist() for layer, load in loads.items()},
            "seconds": round(time.monotonic() - started, 1),
        }
        if keep is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            trained_model = nnx.merge(program.graphdef, state.params, frozen)
            measured = {"eval_loss": result["loss"]}
            write_model(trained_model, recipe, model, model.tokenizer_files, measured, program.trainable)
        return result


def train_kinds(task: Task, results: Results, kinds: Iterable[str]) -> None:
    """Does the runs that are not in the results yet."""

    def is_done(name: str, seed: int) -> bool:
        there = results.get("training", name, str(seed)) is not None
        return there and (name != VANILLA or task.vanilla(seed).exists())

    open_runs = [(name, seed) for name in kinds for seed in task.seeds if not is_done(name, seed)]
    print(f"training: {len(open_runs)} runs of {task.settings.steps} steps to do", flush=True)
    trainer, trainer_of = None, None
    for number, (name, seed) in enumerate(open_runs, start=1):
        model = task.upcycled(name, KINDS[name], seed)
        if trainer_of != name:
            trainer, trainer_of = Trainer(task, model), name
        result = trainer.run(model, seed, task.vanilla(seed) if name == VANILLA else None)
        if results.get("training", name, str(seed)) is None:
            results.put("training", name, str(seed), value=result)
        print(
            f"[{number}/{len(open_runs)}] {name}, seed {seed}: held-out loss {result['start_loss']:.4f} -> "
            f"{result['loss']:.4f} in {result['seconds']:.0f} s",
            flush=True,
        )
