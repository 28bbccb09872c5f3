"""The job that all studies of training have: a kept model takes a shape, is trained, and is scored."""

import dataclasses
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from evidence.studies.corpus import Corpus, given_model, middle_config, tokenizer_file
from evidence.studies.jobs import DIVERGED, Place, new_folder
from evidence.studies.models import Leaves, grown, keep, model_of, read_leaves
from evidence.studies.parameter_groups import groups_of
from evidence.studies.rates import Rates
from evidence.studies.scales import MIDDLE, SCALES, SEEDS, Scale
from evidence.studies.shapes import BTX, DRAWN, PROMPTED, Shape, shape_of
from evidence.studies.texts import DOMAINS, MIXTURES
from evidence.studies.trainer import Trainer
from moe_jax.model_io.loading import abstract_model, model_leaves
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import ModelConfig
from moe_jax.peft import trainable_paths
from moe_jax.training.program import draw_model
from moe_jax.upcycling.beginnings import MOST_TOKENS, Prompt, router_kernels

DENSE = "dense"
MODEL = "model"
SELECTION, TEST = "selection", "test"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
      scale: name of one of `SCALES`.
      shape: what the model becomes before it is trained (`shapes.shape_of`).
      steps: of training; 0: only scored.
      seed: of new leaves, the order of the text, and dropout.
      rates: the highest learning rate of every group.
      start: name of the model that it begins with: the scale's dense one, or one that was kept.
      mixture: of texts that it is trained on and scored with.
      split: what part is scored, `selection` or `test`.
      keep: name under which the trained model is kept; empty: it is not.
    """

    scale: str
    shape: str
    steps: int
    seed: int
    rates: Rates
    start: str = DENSE
    mixture: str = "domains"
    split: str = TEST
    keep: str = ""


def train_run(place: Place, run: Run) -> dict[str, Any]:
    """Trains and scores.

    Returns:
      losses: of every domain, nats per token. start_losses: before training.
      rates: the highest learning rate of every group.
      train_loss: mean of the last steps. trained: parameters that are trained. params: all of them.
      auxiliary: what the auxiliary losses add, first and last step.
      diverged: only and always there if the loss was not finite; then the losses are not.
    """
    shape = shape_of(run.shape)
    # Scored as it is trained.
    with shape.patched():
        return _train(place, run, shape)


def _train(place: Place, run: Run, shape: Shape) -> dict[str, Any]:
    scale = SCALES[run.scale]
    start = start_config(place, run.scale, run.start)
    config = shape.config(start)
    corpus = _corpus(place, scale, start)
    leaves = _first(place, run, shape, config, corpus)
    trainer = _trainer(run.shape, config, max(run.steps, 1), scale.warmup_steps)
    model = model_of(leaves)
    scored = corpus.scored(run.split, MIXTURES[run.mixture])

    def losses(model: Any) -> dict[str, float]:
        return {name: trainer.score(model, ids, scale.seq_len) for name, ids in scored.items()}

    found: dict[str, Any] = {
        "start_losses": losses(model),
        "rates": dict(run.rates),
        "trained": trainer.trained_params,
        "params": sum(leaf.size for leaf in leaves.leaves.values()),
    }
    if not run.steps:
        return found | {"losses": found["start_losses"]}
    batches = corpus.batches(run.mixture, run.seed, run.steps)
    trained = trainer.run(model, batches, seed=run.seed, rates=dict(run.rates))
    found |= {"losses": losses(trained.model), "train_loss": trained.loss, "auxiliary": list(trained.auxiliary)}
    if not all(map(np.isfinite, [trained.loss, *found["losses"].values()])):
        return {DIVERGED: True}
    if run.keep:
        folder = new_folder(kept_folder(place, run.scale, run.keep))
        keep(trained.model, folder / MODEL, [corpus.tokenizer_file])
    return found


def kept_folder(place: Place, scale: str, name: str) -> Path:
    """The folder of a kept model, and of copies of it; whether it is there or not."""
    return place.work / "models" / scale / name


def kept_path(place: Place, scale: str, name: str) -> Path:
    """The model directory of a kept model, whether it is there or not."""
    return kept_folder(place, scale, name) / MODEL


@cache  # asked for every shape of the plan after every job
def trained_groups(place: Place, scale: str, start: str, shape: str) -> tuple[str, ...]:
    """The groups of parameters that are trained once a model has taken a shape; needs no weights."""
    model = abstract_model(shape_of(shape).config(start_config(place, scale, start)))
    return groups_of(trainable_paths(model))


def start_config(place: Place, scale: str, name: str) -> ModelConfig:
    """The config of a model that runs begin with."""
    if name != DENSE:
        return ModelDirectory(kept_path(place, scale, name)).config
    return middle_config() if scale == MIDDLE.name else given_model(place, SCALES[scale]).config


@lru_cache(maxsize=4)
def load_kept(place: Place, scale: str, name: str) -> Leaves:
    """A model that was kept; the dense ones of scales that bring them are read where they are.

    Raises:
      FileNotFoundError: if it is not there.
    """
    if name == DENSE and scale != MIDDLE.name:
        return read_leaves(given_model(place, SCALES[scale]))
    return read_leaves(ModelDirectory(kept_path(place, scale, name)))


@lru_cache(maxsize=2)
def _trainer(shape: str, config: ModelConfig, steps: int, warmup_steps: int) -> Trainer:
    """Compiled once for a shape: those of the same config can be patched differently."""
    del shape
    return Trainer(config, steps=steps, warmup_steps=min(warmup_steps, steps - 1))


@lru_cache(maxsize=4)
def _corpus(place: Place, scale: Scale, config: ModelConfig) -> Corpus:
    return Corpus(place, scale, config, tokenizer_file(place, scale))


def _first(place: Place, run: Run, shape: Shape, config: ModelConfig, corpus: Corpus) -> Leaves:
    """The model before it is trained."""
    if shape.parts == DRAWN:
        return Leaves(config, {path: np.asarray(leaf) for path, leaf in model_leaves(draw_model(config, run.seed))})
    base = load_kept(place, run.scale, run.start)
    branches, routers = [], None
    if shape.parts == BTX:
        # Learning rates are chosen with the models of the first seed.
        seed = run.seed if run.seed in SEEDS else SEEDS[0]
        branches = [load_kept(place, run.scale, f"{name}-s{seed}") for name in DOMAINS]
    if shape.parts == PROMPTED:
        # Of every domain another stretch for every seed.
        tokens = (corpus.encode(name)[run.seed % 10 * MOST_TOKENS :][:MOST_TOKENS] for name in DOMAINS)
        routers = router_kernels(base, [Prompt(ids) for ids in tokens], config.moe_layers)
    return grown(config, base, spec=dataclasses.replace(shape.spec, seed=run.seed), branches=branches, routers=routers)
