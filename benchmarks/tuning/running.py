"""Runs what is not in the results yet: first the learning rate of a group is chosen, then every seed is trained."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from moe_jax.models import ModelConfig
from tuning.models import Leaves, grown, model_of
from tuning.results import Results
from tuning.task import Task
from tuning.trainer import Trainer
from tuning.variants import active_params


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained with every seed.

    Attributes:
      name: key in the results.
      config: of the model.
      rates: learning rates to choose from.
      rates_of: name of the run whose choice is taken.
    """

    name: str
    config: ModelConfig
    rates: tuple[float, ...]
    rates_of: str


class Part:
    """One part of the benchmark: runs that start from the same models and train as long.

    Attributes:
      name: key in the results.
      texts: names of what is trained on. Learning rates are chosen on the first of all.
    """

    def __init__(
        self, name: str, task: Task, runs: Sequence[Run], texts: Sequence[str], *, steps: int,
        base: Callable[[int], Leaves]
    ):  # fmt: skip
        """Takes what all runs share: training steps, and the model that a seed begins with."""
        self.name = name
        self.texts = tuple(texts)
        self._task = task
        self._runs = {run.name: run for run in runs}
        self._steps = steps
        self._base = lru_cache(maxsize=4)(base)
        # A run and the one whose learning rate it takes.
        self._trainer = lru_cache(maxsize=2)(self._make_trainer)

    def measure(self, results: Results, names: Sequence[str] | None = None) -> None:
        """Does the runs that are not there yet; of all runs, or of those that are named."""
        to_do = [
            (self._runs[name], text, seed)
            for name in (self._runs if names is None else names)
            for text in self.texts
            for seed in self._task.seeds
            if results.get(self.name, text, name, str(seed)) is None
        ]
        print(f"{self.name}: {len(to_do)} runs of {self._steps} steps to do", flush=True)
        started = time.monotonic()
        for number, (run, text, seed) in enumerate(to_do, start=1):
            peak = self._rate(results, self._runs[run.rates_of])
            result = self._train(run, text, seed, peak)
            results.put(self.name, text, run.name, str(seed), value=result)
            left = (time.monotonic() - started) / number * (len(to_do) - number) / 60
            print(
                f"[{number}/{len(to_do)}] {run.name}, {text}, seed {seed}: held-out loss {result['loss']:.4f} in "
                f"{result['seconds']:.0f} s; {left:.0f} min left",
                flush=True,
            )

    def _rate(self, results: Results, run: Run) -> float:
        """The learning rate with the lowest loss of the validation text, with a seed of its own."""
        there = results.get("rates", self.name, run.name)
        if there is None:
            text, seed = self.texts[0], self._task.settings.rate_seed
            tried = {f"{rate:g}": self._train(run, text, seed, rate)["validation_loss"] for rate in run.rates}
            there = {"text": text, "validation_loss": tried, "chosen": float(min(tried, key=tried.__getitem__))}
            results.put("rates", self.name, run.name, value=there)
            print(f"{run.name}: learning rate {there['chosen']:g} of {tried}", flush=True)
        return there["chosen"]

    def _make_trainer(self, run: Run) -> Trainer:
        return Trainer(run.config, steps=self._steps, warmup_steps=self._task.settings.warmup_steps)

    def _train(self, run: Run, text: str, seed: int, peak: float) -> dict:
        task, trainer = self._task, self._trainer(run)
        scored, seq_len = task.scored(text), task.settings.seq_len
        base_seed = seed if seed in task.seeds else task.seeds[0]
        model = model_of(grown(run.config, self._base(base_seed), seed))
        found = {}
        if seed == task.seeds[0]:
            # Once is enough to see whether a run starts as its base.
            found["start_validation_loss"] = trainer.score(model, scored.validation, seq_len)
        trained = trainer.run(model, task.batches(text, seed), seed=seed, peak=peak)
        # A learning rate is chosen without a look at the held-out text.
        if seed == task.settings.rate_seed:
            found["validation_loss"] = trainer.score(trained.model, scored.validation, seq_len)
        else:
            found["loss"] = trainer.score(trained.model, scored.held_out, seq_len)
        return {
            **found,
            "train_loss": trained.loss,
            "auxiliary": trained.auxiliary,
            "trained_params": trainer.trained_params,
            "active_params": active_params(run.config),
            "learning_rate": peak,
            "seconds": round(trained.seconds, 1),
        }
