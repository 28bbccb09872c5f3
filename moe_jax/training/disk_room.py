"""The room that a run needs on its disk, known before it begins, and what is kept if the disk is full all the same."""

import contextlib

import jax

from moe_jax.core.formatting import show_bytes
from moe_jax.files.staging import require_space
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.adapter_dir import AdapterDirectory
from moe_jax.model_io.loading import disk_paths, leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.training.program import Program
from moe_jax.training.recipe import Recipe
from moe_jax.training.run_directory import CHECKPOINTS, saved_steps
from moe_jax.training.saved_model import output_dtype, trained_config


def require_room(recipe: Recipe, program: Program, source: ModelSource | None, *, copied: int | None = None) -> None:
    """Raises `InputError` if the checkpoints that a run will keep, and its model, have no room on the run's disk.

    A new checkpoint is written before an old one goes. `copied` is the step of a checkpoint of another run that will be
    copied into this one. Buckets have room.
    """
    run_dir = as_path(recipe.run_dir)
    checkpoint, model = checkpoint_bytes(program), model_bytes(recipe, program, source)
    there, keep = saved_steps(run_dir), recipe.checkpoint.keep
    done = copied if copied is not None else max(there, default=0)
    number = checkpoints_to_save(done, recipe) + (copied is not None)
    at_once, at_end = (min(most, len(there) + number) for most in (keep + 1, keep))
    require_space(
        run_dir / CHECKPOINTS,
        max((at_once - len(there)) * checkpoint if number else 0, (at_end - len(there)) * checkpoint + model),
        what=f"up to {at_once} checkpoints of {show_bytes(checkpoint)}, as checkpoint.keep = {keep}, and a model of "
        f"{show_bytes(model)}",
    )


def checkpoints_to_save(done: int, recipe: Recipe) -> int:
    """Returns the number of checkpoints that a run saves after so many steps, the last step's included."""
    steps, every = recipe.train.steps, recipe.checkpoint.every
    return -(-steps // every) - done // every if done < steps else 0


def checkpoint_bytes(program: Program) -> int:
    """Returns the bytes of the arrays of a checkpoint."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state))


def model_bytes(recipe: Recipe, program: Program, source: ModelSource | None) -> int:
    """Returns the bytes of the arrays that the run writes as its model, or as its adapters."""
    started_from = source if recipe.model.init == "checkpoint" else None
    stored = None if started_from is None else started_from.specs()
    specs = leaf_specs(trained_config(program.config, recipe))
    if isinstance(started_from, AdapterDirectory):
        trained = {leaf for path in program.trainable for leaf in disk_paths(program.config, path)}
        specs = {path: spec for path, spec in specs.items() if path in trained | started_from.own_specs().keys()}
    return sum(spec.size * output_dtype(path, spec.dtype, recipe, stored).itemsize for path, spec in specs.items())


def kept_after(error: OSError, recipe: Recipe, continue_command: str) -> str:
    """Returns a sentence on what a run has saved that ended with an error of its disk; the error then names a place."""
    run_dir = as_path(recipe.run_dir)
    if error.errno is not None and error.filename is None:
        error.filename = str(run_dir)
    saved: dict = {}
    with contextlib.suppress(OSError):
        saved = dict(saved_steps(run_dir))
    if not saved:
        return "no checkpoint had been saved; the same command begins anew"
    return f"the checkpoint of step {max(saved)} is kept; continue with: {continue_command}"
