"""The run directory: the outputs of a run, and everything needed to continue it.

    recipe.toml      the recipe as resolved, overrides included
    run.json         the inputs of the run, identified by content (`continuation`)
    tokenizer/       the tokenizer's files, and others that go with the model
    checkpoints/     the last few training checkpoints
    metrics.jsonl    one line per step
    tensorboard/     the same as events
    profile/         a profiler trace, if the recipe asks for one
    wandb/, wandb_id files of Weights & Biases, likewise
    model/           a model directory, at the end

While a process works on the run it holds a lock on the directory, and `.lock` says which process that is. In a bucket
`.lock` is a lease, checkpoints/steps.json lists the checkpoints, and the files of Weights & Biases are elsewhere.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.checkpoints.saved_state import read_steps
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.distributed.processes import first_decides
from moe_jax.files.remote_work import Lease
from moe_jax.files.staging import DirectoryLock, hold_alone, place_to_replace, replace_directory
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import list_tokenizer_files, read_tokenizer_file, tokenizer_files_in
from moe_jax.model_io.adapter_dir import AdapterDirectory, AdapterDirectoryWriter
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import disk_paths, may_be_cast, model_leaves
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder
from moe_jax.training.recipe import recipe_toml
from moe_jax.training.recipe.schema import Recipe, load_recipe
from moe_jax.training.run.continuation import RECORD, Restart, RunRecord, read_record, write_record

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
_TOKENIZER = "tokenizer"
_HOLDER = ".lock"


class RunLock:
    """Keeps all other processes out of a run directory, from `take` to the end of the block. A context manager.

    In a run with several processes the first one holds the lock.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = as_path(run_dir)
        self._held: DirectoryLock | Lease | None = None

    def __enter__(self) -> Self:
        return self

    def take(self) -> None:
        """Locks the directory, which is created if necessary; does nothing if the lock is held already.

        Raises:
          InputError: if another process holds the lock; the message says which. In a bucket that is a lease: one that
            nobody renews any more is waited for.
        """
        if self._held is None:
            self._held = hold_alone(self._run_dir, _HOLDER)

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.release()


def read_run(run_dir: Path, *, resume: bool) -> Recipe | None:
    """Returns the recipe of the run in a directory; None if there is none. Writes nothing.

    Raises:
      InputError: if `run_dir` exists and is not to be continued, or is not a run.
    """
    # In a bucket, the listing that shows whether something exists may be late.
    if not (run_dir / RECIPE).is_file() and not run_dir.exists() and not run_dir.is_symlink():
        return None
    if run_dir.is_dir() and all(child.name == _HOLDER for child in run_dir.iterdir()):
        return None
    if not resume:
        raise InputError(f"{run_dir} already exists; continue it with --resume, or choose another run_dir")
    if not (run_dir / RECIPE).is_file():
        raise InputError(f"{run_dir} is not a training run: it has no {RECIPE}; choose another run_dir")
    if not (run_dir / RECORD).is_file() and any((run_dir / CHECKPOINTS).glob("*")):
        raise InputError(f"{run_dir} has checkpoints, but no {RECORD} that says of what; start a new run")
    return load_recipe(run_dir / RECIPE)


def split_step(path: Path) -> tuple[Path, int] | None:
    """Returns the run and the step of `RUN@STEP`; None if the path does not have this form, or exists."""
    match = re.fullmatch(r"(.+)@(\d{1,18})", Path(path).name)
    if match is None or as_path(path).exists():
        return None
    return as_path(path).with_name(match[1]), int(match[2])


def saved_steps(run_dir: Path) -> list[int]:
    """Returns the steps of the checkpoints of a run, ascending."""
    return list(read_steps(as_path(run_dir) / CHECKPOINTS))


def folder_of(run_dir: Path, step: int) -> Path:
    """Returns the folder of a checkpoint of a run."""
    return read_steps(as_path(run_dir) / CHECKPOINTS)[step]


def describe_run(path: Path) -> str | None:
    """Returns what to give instead of a run directory where a model is expected; None if it is no run directory."""
    if not (path / RECIPE).is_file() or not (path / RECORD).is_file():
        return None
    steps = saved_steps(path)
    places = [str(path / MODEL)] if (path / MODEL).exists() or not steps else []
    places += [f"{path}@STEP for a checkpoint of step {', '.join(map(str, steps))}"] if steps else []
    return f"{path} is a training run and not a model; give {', or '.join(places)}"


def check_saved(run_dir: Path, step: int) -> RunRecord:
    """Returns the record of a run.

    Raises:
      FileNotFoundError: if there is no run.
      InputError: if it has no checkpoint of the step, or its record cannot be read.
    """
    record = read_record(run_dir)
    if record is None:
        raise FileNotFoundError(f"no training run at {run_dir}: there is no {RECORD}")
    steps = saved_steps(run_dir)
    if step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise InputError(f"{run_dir} has no checkpoint of step {step}; it has {listed}")
    return record


def update_run(run_dir: Path, recipe: Recipe, record: RunRecord) -> None:
    """Writes the resolved recipe of a continued run, and the present path of its model."""
    as_path(run_dir / RECIPE).replace_content(recipe_toml.to_toml(recipe).encode())
    write_record(run_dir, record)


def write_beginning(run_dir: Path, recipe: Recipe, record: RunRecord, files: Mapping[str, Path]) -> None:
    """Writes everything that a run directory holds before the first step, the record last.

    Args:
      run_dir: the directory; files of a beginning that was interrupted are replaced.
      recipe: as resolved.
      record: the inputs of the run.
      files: files that go with the model, by name.
    """
    as_path(run_dir / RECIPE).replace_content(recipe_toml.to_toml(recipe).encode())
    folder = as_path(run_dir / _TOKENIZER)
    folder.remove_tree()
    folder.mkdir()
    list_tokenizer_files(folder, files)
    for name, file in files.items():
        (folder / name).write_durably(read_tokenizer_file(file))
    write_record(run_dir, record)


def files_of_run(run_dir: Path) -> tuple[Path, ...]:
    """Returns the files that go with the model of a run: its tokenizer's, and others."""
    return tokenizer_files_in(run_dir / _TOKENIZER)


def write_model(
    model: Decoder,
    recipe: Recipe,
    source: ModelSource | None,
    files: Sequence[Path],
    measured: dict[str, Any],
    trainable: Collection[str],
    *,
    restarts: Sequence[Restart] = (),
) -> Path:
    """Writes `run_dir/model` and returns its path; an earlier one of the same run is replaced.

    If training started from an adapter directory, the output is an adapter directory over the same base. It holds the
    leaves that the first one held, and all others that were trained.

    Args:
      model: with the trained parameters.
      recipe: of the run.
      source: the model that training started from; its lineage is continued.
      files: files that go with the model, copied.
      measured: measurements for the lineage.
      trainable: paths in memory of the trained parameters.
      restarts: of the run, for the lineage.

    Raises:
      InputError: if parameters are not finite, or too large for the recipe's `output_dtype`.
    """
    target = as_path(recipe.run_dir) / MODEL
    started_from = source if recipe.model.init == "checkpoint" else None
    lineage = lineage_of(recipe, source, measured, restarts)
    # Where nothing takes the place of an earlier model at once, the checkpoint has all to write it again.
    fresh = as_path(first_decides(lambda: str(place_to_replace(target))))
    if isinstance(started_from, AdapterDirectory):
        trained = {name for path in trainable for name in disk_paths(model.config, path)}
        own = trained | started_from.own_specs().keys()
        writer = AdapterDirectoryWriter(
            fresh, model.config, base=started_from.base, trained=own, tokenizer_files=files, lineage=lineage
        )
    else:
        own = None
        writer = ModelDirectoryWriter(fresh, model.config, tokenizer_files=files, lineage=lineage)
    # Every process must make these calls, and writes the shards that it has.
    with writer:
        stored = None if started_from is None else started_from.specs()
        for path, leaf in _written_leaves(model, recipe, stored, own):
            if isinstance(leaf, jax.Array):
                writer.write_sharded(path, leaf, output_dtype(path, leaf.dtype, recipe, stored))
            else:
                writer.write({path: leaf})
    first_decides(lambda: replace_directory(target, fresh))
    return target


def lineage_of(
    recipe: Recipe, source: ModelSource | None, measured: Mapping[str, Any], restarts: Sequence[Restart]
) -> list[dict[str, Any]]:
    """Returns the lineage of a trained model; see `write_model`."""
    options = {key: recipe_toml.plain(value) for key, value in recipe_toml.flatten(recipe).items() if value is not None}
    if restarts:
        options["restarts"] = [dataclasses.asdict(restart) for restart in restarts]
    if source is None or recipe.model.init != "checkpoint":
        return [new_lineage_entry("train", options, [], measured)]
    return [*source.lineage, new_lineage_entry("train", options, [source], measured)]


def trained_config(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """Returns the config of the trained model, with the dtype of its output."""
    begun_with = config.dtype if recipe.model.init == "checkpoint" else recipe.model.param_dtype
    return dataclasses.replace(config, dtype=recipe.model.output_dtype or begun_with)


def output_dtype(
    path: str, held: jnp.dtype, recipe: Recipe, stored: Mapping[str, jax.ShapeDtypeStruct] | None
) -> jnp.dtype:
    """Returns the dtype in which the trained model has a leaf.

    Args:
      path: of the leaf.
      held: its dtype in training.
      recipe: of the run.
      stored: the leaves of the model that training started from; None: it started from new weights.
    """
    if not may_be_cast(path, held):
        return held
    if recipe.model.output_dtype is not None:
        return jnp.dtype(recipe.model.output_dtype)
    return held if stored is None or path not in stored else stored[path].dtype


def _written_leaves(
    model: Decoder, recipe: Recipe, stored: Mapping[str, jax.ShapeDtypeStruct] | None, only: Collection[str] | None
) -> Iterator[tuple[str, np.ndarray | jax.Array]]:
    """Yields leaves, all or some, in the output dtype; leaves sharded over processes as they are in training."""
    for path, leaf in model_leaves(model):
        if only is not None and path not in only:
            continue
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            yield path, leaf
        else:
            leaf = np.asarray(leaf)
            yield path, cast(path, leaf, output_dtype(path, leaf.dtype, recipe, stored))
