"""The run directory: the outputs of a run, and what is needed to continue it.

    recipe.toml      the recipe as resolved, overrides included
    checkpoints/     the last few training checkpoints
    metrics.jsonl    one line per step
    tensorboard/     the same as events
    model/           a model directory, at the end
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from moe_jax.adapter_dir import AdapterDirectory, AdapterDirectoryWriter
from moe_jax.errors import InputError
from moe_jax.lineage import new_lineage_entry
from moe_jax.loading import disk_paths, may_be_cast, model_leaves
from moe_jax.model_dir import ModelDirectoryWriter
from moe_jax.model_source import ModelSource
from moe_jax.nn import Decoder
from moe_jax.processes import is_first_process, wait_for_all
from moe_jax.staging import remove_directory, remove_replaced, replace_directory, replace_file
from moe_jax.train import recipe_toml
from moe_jax.train.recipe import Recipe, check_continues, load_recipe

RECIPE = "recipe.toml"


def check_run_directory(recipe: Recipe, *, resume: bool) -> bool:
    """Returns whether there is a run to continue; writes nothing.

    Raises:
      InputError: if `run_dir` exists and is not to be continued, is not a run, or was made by another recipe.
    """
    run_dir = Path(recipe.run_dir)
    if not run_dir.exists() and not run_dir.is_symlink():
        return False
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        return False
    if not resume:
        raise InputError(f"{run_dir} already exists; continue it with --resume, or choose another run_dir")
    if not (run_dir / RECIPE).is_file():
        raise InputError(f"{run_dir} is not a training run: it has no {RECIPE}; choose another run_dir")
    check_continues(load_recipe(run_dir / RECIPE), recipe)
    return True


def write_recipe(recipe: Recipe) -> None:
    """Creates the run directory, if necessary, and writes the resolved recipe into it."""
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(run_dir / RECIPE, recipe_toml.to_toml(recipe).encode())


def write_model(
    model: Decoder,
    recipe: Recipe,
    source: ModelSource | None,
    tokenizer: Path,
    measured: dict[str, Any],
    trainable: Collection[str],
) -> Path:
    """Writes `run_dir/model` and returns its path; an earlier one of the same run is replaced.

    If training started from an adapter directory, the output is an adapter directory over the same base. It holds the
    leaves that the first one held, and all others that were trained.

    Args:
      model: with the trained parameters.
      recipe: of the run.
      source: what it started from; its lineage is continued and its tokenizer files are copied.
      tokenizer: the tokenizer file of the run, copied if there is no source.
      measured: measurements for the lineage.
      trainable: paths in memory of the trained parameters.
    """
    target = Path(recipe.run_dir) / "model"
    options = {key: value for key, value in recipe_toml.flatten(recipe).items() if value is not None}
    options["data.sources"] = [recipe_toml.flatten(section) for section in recipe.data.sources]
    started_from = source if recipe.model.init == "checkpoint" else None
    entry = new_lineage_entry("train", options, [] if started_from is None else [started_from], measured)
    files = source.tokenizer_files if source else (tokenizer,)
    lineage = [*([] if started_from is None else started_from.lineage), entry]
    fresh = target.with_name("model.new")
    if is_first_process():
        remove_replaced(target)
        if fresh.exists():
            remove_directory(fresh)
    wait_for_all("stale models removed")
    if isinstance(started_from, AdapterDirectory):
        trained = {name for path in trainable for name in disk_paths(model.config, path)}
        own = trained | started_from.own_specs().keys()
        writer = AdapterDirectoryWriter(
            fresh, model.config, base=started_from.base, trained=own, tokenizer_files=files, lineage=lineage
        )
    else:
        own = None
        writer = ModelDirectoryWriter(fresh, model.config, tokenizer_files=files, lineage=lineage)
    # Every process must make these calls; only the first one writes.
    with writer:
        for path, leaf in _gathered(model, recipe.model.output_dtype, own):
            writer.write({path: leaf})
    if is_first_process():
        replace_directory(target, fresh)
    wait_for_all("model written")
    return target


def _gathered(model: Decoder, dtype: str | None, only: Collection[str] | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields unsharded leaves, all or some; every process takes part in gathering those sharded over hosts."""
    for path, leaf in model_leaves(model):
        if only is not None and path not in only:
            continue
        if dtype and may_be_cast(path, leaf.dtype):
            leaf = leaf.astype(dtype)
        if jax.process_count() > 1:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        yield path, np.asarray(leaf)
