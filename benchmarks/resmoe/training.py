"""Trains the models that are compressed, with the library's own training program. A trained model is kept."""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import rich.console

from moe_jax.compress import Calibration
from moe_jax.compress.calibration.recorded import LayerCalibration
from moe_jax.loading import load_model
from moe_jax.model_dir import ModelDirectory
from moe_jax.model_source import ModelSource
from moe_jax.open_source import open_source
from moe_jax.sharding import make_mesh
from moe_jax.train.data_sections import DataSection, SourceSection
from moe_jax.train.evaluation import read_text
from moe_jax.train.expert_load import measure_router_statistics
from moe_jax.train.recipe import (
    CheckpointSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    ScheduleSection,
    TrainSection,
)
from moe_jax.train.run import train
from moe_jax.train.tokenizer import Tokenizer, find_tokenizer
from moe_jax.upcycle import UpcycleOptions, upcycle
from quality.text import split_text
from resmoe.bfloat16 import DTYPE, write_bfloat16
from resmoe.settings import CALIBRATION_TOKENS, RANDOM, SCORED_TOKENS, UPCYCLED, Origin, Settings


class Task:
    """The dense model, the text, and where models are kept.

    Attributes:
      settings: equal for every model.
      seeds: of the models.
      train_text: file of the text that models are trained on.
      held_out: Int32[n], the text that is scored.
    """

    def __init__(self, data: Path, work: Path, settings: Settings, seeds: Iterable[int]):
        """Reads the text.

        Args:
          data: folder with `weights/stories260K/hf` and `text/tinyshakespeare/input.txt`.
          work: folder of the trained models.
          settings: equal for every model.
          seeds: of the models.

        Raises:
          SystemExit: if the folder holds models of other settings.
        """
        self.settings = settings
        self.seeds = tuple(seeds)
        self._work = work
        work.mkdir(parents=True, exist_ok=True)
        self._claim()
        self._dense = open_source(data / "weights" / "stories260K" / "hf")
        self.train_text, held_out = split_text(data, work, settings.held_out_share)
        file = find_tokenizer(self._dense.tokenizer_files, self._dense.path)
        self._tokenizer = Tokenizer(file, self._dense.config)
        self.held_out = read_text(held_out, self._tokenizer)[:SCORED_TOKENS]

    def model_path(self, origin: Origin, seed: int) -> Path:
        """The model directory of a trained model, whether it is there or not."""
        return self._work / "models" / f"{origin.name}-s{seed}"

    def model(self, origin: Origin, seed: int) -> ModelSource:
        """A trained model in bfloat16: what is compressed. The trained model must be there."""
        trained = self.model_path(origin, seed)
        rounded = self._work / DTYPE / trained.name
        if not rounded.exists():
            write_bfloat16(ModelDirectory(trained), rounded)
        return ModelDirectory(rounded)

    def calibration(self, origin: Origin, seed: int) -> Calibration:
        """What the routers of a model do on the beginning of the text that it was trained on."""
        ids = read_text(self.train_text, self._tokenizer)[:CALIBRATION_TOKENS]
        mesh = make_mesh({}, jax.devices()[:1])
        statistics = measure_router_statistics(
            load_model(self.model(origin, seed), mesh=mesh),
            ids,
            seq_len=self.settings.seq_len,
            batch_size=16,
            mesh=mesh,
        )
        layers = {layer: LayerCalibration(found) for layer, found in statistics.items()}
        return Calibration(self.train_text, layers)

    def train(self, origin: Origin, seed: int) -> None:
        """Trains one model; a run that was killed begins anew."""
        run_dir = self._work / "runs" / f"{origin.name}-s{seed}"
        shutil.rmtree(run_dir, ignore_errors=True)
        start = self._start(origin, seed, run_dir / "start")
        recipe = self._recipe(origin, seed, start, run_dir / "run")
        trained = train(recipe, start.config, start, console=rich.console.Console(quiet=True))
        target = self.model_path(origin, seed)
        target.parent.mkdir(exist_ok=True)
        trained.rename(target)
        shutil.rmtree(run_dir)

    def _start(self, origin: Origin, seed: int, folder: Path) -> ModelSource:
        """stories260K as an MoE; a run from random weights takes its config and tokenizer alone."""
        options = UpcycleOptions(
            num_experts=origin.num_experts,
            top_k=self.settings.top_k,
            every=1,
            balance_coef=self.settings.balance_coef,
        )
        upcycle(self._dense, folder, options, seed=seed, check=False, described={"seed": seed})
        return ModelDirectory(folder)

    def _recipe(self, origin: Origin, seed: int, start: ModelSource, run_dir: Path) -> Recipe:
        settings = self.settings
        steps = {UPCYCLED: settings.upcycled_steps, RANDOM: settings.random_steps}[origin.start]
        return Recipe(
            run_dir=str(run_dir),
            model=ModelSection(path=str(start.path), init="random" if origin.start == RANDOM else "checkpoint"),
            seed=seed,
            data=DataSection(
                sources=(SourceSection(path=str(self.train_text)),),
                seq_len=settings.seq_len,
                # Short pieces in random order: with long ones a run ends on a few plays (see `ders.training`).
                piece_kib=1,
            ),
            optimizer=OptimizerSection(learning_rate=settings.learning_rate, weight_decay=settings.weight_decay),
            schedule=ScheduleSection(warmup_steps=settings.warmup_steps),
            train=TrainSection(steps=steps, batch_size=settings.batch_size),
            checkpoint=CheckpointSection(every=steps, keep=1),
            log=LogSection(tensorboard=False),
        )

    def _claim(self) -> None:
        """Writes down the settings that the models of the folder are trained with, or compares them."""
        file = self._work / "settings.json"
        here = dataclasses.asdict(self.settings)
        if not file.exists():
            file.write_text(json.dumps(here, indent=1) + "\n")
        elif json.loads(file.read_text()) != here:
            raise SystemExit(f"{self._work} holds models trained with other settings; choose another --work")


def train_models(task: Task, origins: Iterable[Origin]) -> None:
    """Trains the models that are not there yet."""
    to_do = [(origin, seed) for origin in origins for seed in task.seeds if not task.model_path(origin, seed).exists()]
    print(f"training: {len(to_do)} models", flush=True)
    for number, (origin, seed) in enumerate(to_do, start=1):
        started = time.monotonic()
        task.train(origin, seed)
        print(f"[{number}/{len(to_do)}] {origin.name}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
