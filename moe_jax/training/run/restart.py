"""Restarts a run from one of its checkpoints, with other optimizer settings or without some of its batches.

A restart is a run of its own: its directory begins with the checkpoint, and the run that it came from is not changed.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from moe_jax.checkpoints.saved_state import begin_with
from moe_jax.core.errors import InputError
from moe_jax.files.remote_work import is_begun
from moe_jax.files.resume import PARTIAL, require_space, staged_directory
from moe_jax.files.storage_path import as_path
from moe_jax.training.recipe.schema import Recipe, load_recipe
from moe_jax.training.run.checkpoint_copy import bytes_of_checkpoint, copy_checkpoint
from moe_jax.training.run.continuation import RECORD, Restart, RunRecord, changed_keys, with_horizon
from moe_jax.training.run.run_directory import (
    CHECKPOINTS,
    METRICS,
    RECIPE,
    check_saved,
    files_of_run,
    folder_of,
    split_step,
    write_beginning,
)

# If one of these differs, the optimizer's state in the checkpoint is useless.
_KINDS_OF_MOMENTS = ("optimizer.kind", "optimizer.moments")


class Origin(NamedTuple):
    """The checkpoint that a run begins with.

    Attributes:
      run_dir: of the run that it belongs to.
      step: of the checkpoint.
      recipe: of that run.
      record: of that run.
    """

    run_dir: Path
    step: int
    recipe: Recipe
    record: RunRecord


def find_origin(saved: Path, run_dir: Path) -> Origin:
    """Finds the checkpoint `RUN@STEP`, for a run that is to be written at `run_dir`.

    Raises:
      FileNotFoundError: if there is no run.
      InputError: if it has no such checkpoint, `saved` has another form, or there is something at `run_dir`.
    """
    parts = split_step(saved)
    if parts is None:
        raise InputError(f"cannot restart from {saved}: expected RUN@STEP, as in run@500")
    # In a bucket, the remains of an interrupted restart are where the run will be.
    is_run = (run_dir / RECORD).is_file()
    begun = not is_run and is_begun(as_path(run_dir), PARTIAL)
    if is_run or (run_dir.exists() and not begun) or run_dir.is_symlink():
        raise InputError(f"{run_dir} already exists, and a restart is a new run; choose another run_dir")
    record = check_saved(*parts)
    return Origin(*parts, with_horizon(load_recipe(parts[0] / RECIPE)), record)


def check_restarted(run_dir: Path, record: RunRecord | None, saved: Path, *, skip_batches: int) -> None:
    """Raises `InputError` unless the run at `run_dir` began with the checkpoint `RUN@STEP`, without those batches."""
    parts, last = split_step(saved), None if record is None or not record.restarts else record.restarts[-1]
    if last is None:
        raise InputError(f"{run_dir} was not begun with {saved}; leave out --restart, or choose another run_dir")
    if parts is None or (last.step, last.skipped_batches) != (parts[1], skip_batches):
        raise InputError(
            f"{run_dir} was begun with {last.run}@{last.step} without {last.skipped_batches} batches, and not with "
            f"{saved} without {skip_batches}; leave out --restart, or choose another run_dir"
        )


def restart_record(origin: Origin, recipe: Recipe, record: RunRecord, *, skip_batches: int) -> RunRecord:
    """Returns the record of a run that begins with a checkpoint.

    Args:
      origin: the checkpoint.
      recipe: as resolved.
      record: the inputs of the run.
      skip_batches: number of batches that will be left out.
    """
    changed = {key: list(pair) for key, pair in changed_keys(origin.recipe, recipe).items()}
    place = str(origin.run_dir.resolve())
    restart = Restart(run=place, step=origin.step, skipped_batches=skip_batches, changed=changed)
    return dataclasses.replace(record, restarts=(*origin.record.restarts, restart))


def keeps_moments(restart: Restart) -> bool:
    """Whether the optimizer goes on from the state in the checkpoint, and does not begin anew."""
    return not any(key in restart.changed for key in _KINDS_OF_MOMENTS)


def keeps_average(restart: Restart) -> bool:
    """Whether the average of the parameters goes on from that in the checkpoint, if the recipe asks for one."""
    before, _ = restart.changed.get("ema.decay", (0.0, 0.0))
    return before is not None


def write_restart(origin: Origin, run_dir: Path, recipe: Recipe, record: RunRecord) -> None:
    """Makes the directory of a run that has come as far as the checkpoint; it appears whole or not at all.

    In a bucket it counts once its record is there, which is written last.

    Args:
      origin: the checkpoint.
      run_dir: where the directory appears.
      recipe: as resolved.
      record: what `restart_record` returned.

    Raises:
      InputError: if something has appeared at `run_dir`, or the disk has not enough space.
    """
    saved = folder_of(origin.run_dir, origin.step)
    require_space(run_dir, bytes_of_checkpoint(saved))
    with staged_directory(run_dir) as folder:
        # The loop removes the records of later steps.
        (folder / METRICS).write_grown(as_path(origin.run_dir / METRICS).read_grown())
        begin_with(folder / CHECKPOINTS, origin.step, lambda target: copy_checkpoint(saved, target))
        write_beginning(folder, recipe, record, {file.name: file for file in files_of_run(origin.run_dir)})
