"""Training: a whole run from a recipe, or a model on batches in memory."""

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console

from moe_jax.api.model import Model, ModelOrPath, open_model
from moe_jax.api.open_source import open_recipe_model, open_source
from moe_jax.core.errors import InputError, shown
from moe_jax.files import json_toml
from moe_jax.files.staging import check_beside
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.model_source import ModelSource
from moe_jax.training import recipe_toml
from moe_jax.training.in_memory_training import Batch, read_batch, train_on_batches
from moe_jax.training.loop import Stopped
from moe_jax.training.metrics import Record
from moe_jax.training.recipe import Recipe, read_recipe_table
from moe_jax.training.training_run import train as _train

RecipeOrPath = Recipe | Mapping[str, Any] | str | os.PathLike[str]

# Sections and keys of a recipe that say where a run's files are: batches in memory need none.
_OF_FILES = ("run_dir", "data", "checkpoint", "log", "eval")
_OF_MODEL_FILES = ("path", "base", "config", "init", "output_dtype")
# Values of these that would change the result, and are not for batches: what to do in their place.
_NOT_IN_MEMORY = {
    "init": "give a model with new weights, moe_jax.load(recipe)",
    "output_dtype": "load the trained model in it, moe_jax.load(trained, dtype=...)",
}


def train(
    recipe: RecipeOrPath,
    model: ModelOrPath | None = None,
    batches: Iterable[Batch] | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    restart: str | os.PathLike[str] | None = None,
    skip_batches: int = 0,
    on_step: Callable[[Record], object] | None = None,
    verbose: bool = False,
) -> Model:
    """Trains a model: a whole run from a recipe, or a model on batches of tokens in memory.

        >>> import numpy as np
        >>> batch = np.random.default_rng(0).integers(0, 64, (4, 17))
        >>> recipe = {"train": {"steps": 4}, "optimizer": {"learning_rate": 1e-2}}
        >>> losses = []
        >>> moe = moe_jax.tiny_model(experts=4)
        >>> trained = moe_jax.train(recipe, moe, [batch] * 4, on_step=lambda step: losses.append(step["loss"]))
        >>> losses[-1] < losses[0]
        True

    Args:
      recipe: the path of a recipe, a recipe, or its keys as nested mappings. With batches the keys that name files do
        not count, nor have to be there: `run_dir`, `model.path`, `data`, `checkpoint`, `log`, `eval`; without
        `train.batch_size` it is that of the first batch, and without `mesh` the model stays on its devices. They do
        not go with `model.init = "random"` and `model.output_dtype`: what is trained has the dtype `model.param_dtype`.
      model: the model that is trained on the batches, or its path; it is not changed.
      batches: token ids [B, T + 1], rows of one document each, of which every token but the first is a target. Or
        mappings, as the training step takes them: `tokens` and `targets` [B, T], and perhaps `weights`, 0 where a
        target is not scored, `segment_ids`, the documents of a row from 1 on, 0 for padding, and `positions` in them.
        For a model with an encoder they are mappings of `inputs` [B, S] and `targets` [B, T], and perhaps
        `inputs_valid`, false for padding, `segment_ids`, 1 for targets and 0 for padding after them, and `weights`.
        For one that sees they may have `pixels`, uint8 [B, M, H, W, 3], or `features`, and `slots`, as a `Decoder`
        takes them. All have one shape. Training ends with the batches or after `train.steps`.
      overrides: keys of the recipe with other values, as in `["train.steps=100"]`.
      resume: continue the run in the recipe's run directory; where there is none, a new one starts.
      restart: begin a new run with a checkpoint of another one, `RUN@STEP`. Optimizer and schedule may differ.
      skip_batches: with `restart`: leave out this many batches after the checkpoint.
      on_step: with batches: called with `step`, `loss`, `aux_loss`, `grad_norm`, `expert_load` and more after every
        step; a whole run writes these to `metrics.jsonl`.
      verbose: for a whole run: print what `moe-jax train` prints.

    Returns:
      The trained model: that in the run directory, or one in memory.

    Raises:
      FileNotFoundError: if there is nothing at a path.
      InputError: bad input of any kind; also if the loss is no number any more.
      KeyboardInterrupt: after Ctrl-C in a whole run, when a checkpoint is on the disk; `loop.Stopped` after SIGTERM.
    """
    if (model is None) != (batches is None):
        raise InputError("a model and batches go together; without both, the recipe names the model and the data")
    table = _table(recipe, overrides)
    if batches is None:
        if on_step is not None:
            raise InputError("on_step goes with batches; the steps of a whole run are in its metrics.jsonl")
        console = rich.console.Console(quiet=not verbose)
        try:
            path = run_recipe(
                _parse(table, recipe), resume=resume, restart=restart, skip_batches=skip_batches, console=console
            )
        except Stopped as stopped:
            if stopped.signal == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
        return Model.of_source(open_source(path))
    if resume or verbose or restart is not None or skip_batches:
        raise InputError("resume, restart and verbose go with a whole run, and not with batches in memory")
    assert model is not None
    given = model if isinstance(model, Model) else Model.of_source(open_model(model))
    return _train_in_memory(table, given, batches, on_step or (lambda record: None))


def run_recipe(
    recipe: Recipe,
    *,
    resume: bool = False,
    restart: str | os.PathLike[str] | None = None,
    skip_batches: int = 0,
    continue_command: str = "moe_jax.train(..., resume=True)",
    console: rich.console.Console | None = None,
) -> Path:
    """Opens the models that a recipe names and runs it; for the arguments see `training.training_run.train`."""
    if skip_batches < 0 or (skip_batches and restart is None):
        raise InputError(f"skip_batches = {skip_batches}: expected a number of batches from 0, and restart with it")
    source, config = open_recipe_model(recipe, begins=True)
    teacher = _teacher_of(recipe)
    check_beside(as_path(recipe.run_dir), [model.path for model in (teacher, source) if model is not None])
    return _train(
        recipe,
        config,
        source,
        resume=resume,
        restart=None if restart is None else as_path(restart),
        skip_batches=skip_batches,
        continue_command=continue_command,
        console=console,
        teacher=teacher,
    )


def read_recipe(recipe: RecipeOrPath) -> Recipe:
    """Returns a recipe as it is, or read from a file or a mapping; raises as `training.recipe.load_recipe` does."""
    return recipe if isinstance(recipe, Recipe) else _parse(_table(recipe, ()), recipe)


def _teacher_of(recipe: Recipe) -> ModelSource | None:
    return None if recipe.distill is None else open_source(recipe.distill.teacher)


def _table(recipe: RecipeOrPath, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the keys of a recipe, unchecked."""
    if isinstance(recipe, Recipe):
        table: Mapping[str, Any] = recipe_toml.to_table(recipe)
    elif isinstance(recipe, Mapping):
        table = _plain(recipe)
    else:
        table = read_recipe_table(as_path(recipe))
    return recipe_toml.apply_overrides(table, overrides)


def _plain(value: Any) -> Any:
    """Returns mappings as dicts and sequences as lists, as TOML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _parse(table: Mapping[str, Any], given: RecipeOrPath) -> Recipe:
    where = "the recipe" if isinstance(given, Recipe | Mapping) else os.fspath(given)
    return json_toml.parse(Recipe, table, where=where, language="TOML")


def _train_in_memory(
    table: dict[str, Any], model: Model, batches: Iterable[Batch], on_step: Callable[[Record], object]
) -> Model:
    source = model.source
    given = table.get("model", {})
    for key, instead in _NOT_IN_MEMORY.items():
        if given.get(key) not in (None, "checkpoint"):
            raise InputError(f"model.{key} = {shown(given[key])} does not go with batches in memory; {instead}")
    section = {key: value for key, value in given.items() if key not in _OF_MODEL_FILES}
    table = {key: value for key, value in table.items() if key not in _OF_FILES}
    table |= {"run_dir": "in memory", "model": section | {"path": "in memory"}}
    batches = iter(batches)
    if "batch_size" not in table.setdefault("train", {}):
        first = list(itertools.islice(batches, 1))
        if not first:
            raise InputError("there are no batches to train on")
        rows = len(read_batch(first[0], source.config)["tokens"])
        table["train"] = {**table["train"], "batch_size": rows}
        batches = itertools.chain(first, batches)
    devices = None
    if "mesh" not in table:
        devices = jax.devices()[:1] if model.mesh is None else list(model.mesh.devices.flat)
        table["mesh"] = dict(model.mesh.shape) if model.mesh is not None else {"fsdp": 1}
    recipe = _parse(table, table)
    teacher = _teacher_of(recipe)
    decoder, last = train_on_batches(recipe, source, batches, devices=devices, on_step=on_step, teacher=teacher)
    options = {
        key: value
        for key, value in recipe_toml.flatten(recipe).items()
        if value is not None and not key.startswith(_OF_FILES) and value != "in memory"
    }
    measured = {"steps": last.get("step", 0)} | {key: last[key] for key in ("loss",) if key in last}
    entry = new_lineage_entry("train", options, [source], measured)
    trained = Model(decoder, tokenizer_files=model.tokenizer_files, lineage=[*model.lineage, entry])
    trained.base = model.base
    return trained
