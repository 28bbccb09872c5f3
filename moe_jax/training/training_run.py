"""A training run, from the beginning or from its last checkpoint."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import rich.console
from flax import nnx

from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import console_for_tables
from moe_jax.data.chat_template import FILE as CHAT_TEMPLATE
from moe_jax.data.chat_template import template_file
from moe_jax.data.pictures.picture_loading import cache_folder, picture_processing
from moe_jax.data.tokenizer import Tokenizer, find_tokenizer
from moe_jax.distributed.processes import check_equal, describe_devices, first_decides, is_first_process, wait_for_all
from moe_jax.distributed.sharding import undivided_experts
from moe_jax.evaluation.held_out import Evaluator, read_held_out, with_lengths
from moe_jax.files.json_toml import parse
from moe_jax.files.staging import check_writable
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import by_name, with_tokenizer
from moe_jax.model_io.frozen_tower import FrozenTower
from moe_jax.model_io.lineage import read_lineage
from moe_jax.model_io.loading import disk_paths
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.peft.trained import print_trained
from moe_jax.training import recipe_toml
from moe_jax.training.batches import Batches, open_batches
from moe_jax.training.disk_room import kept_after, require_room
from moe_jax.training.loop import Loop
from moe_jax.training.metrics import NO_TENSORBOARD, WANDB_ID, has_tensorboard, import_wandb, read_metrics
from moe_jax.training.program import (
    Program,
    check_tower_of_teacher,
    completed_state,
    first_state,
    initial_states,
    load_teacher,
    make_program,
    mesh_for,
)
from moe_jax.training.recipe import Recipe
from moe_jax.training.restart import Origin, check_restarted, find_origin, restart_record, write_restart
from moe_jax.training.run_directory import (
    CHECKPOINTS,
    METRICS,
    MODEL,
    RECIPE,
    RECORD,
    Restart,
    RunLock,
    RunRecord,
    check_continues,
    check_restarts,
    check_same,
    check_unused,
    clear_unsaved,
    comparable,
    described_record,
    files_of_run,
    is_without_checkpoint,
    make_record,
    read_record,
    read_run,
    restart_before,
    saved_steps,
    with_horizon,
    write_run,
)
from moe_jax.training.saved_model import is_saved_by_layer, trained_config, write_model
from moe_jax.training.train_state import TrainState, averaged_params

# Published models pad their vocabulary by less; a larger difference means another model's tokenizer.
_USED_OF_VOCABULARY = 0.5


def train(
    recipe: Recipe,
    config: ModelConfig,
    source: ModelSource | None,
    *,
    resume: bool = False,
    restart: Path | None = None,
    skip_batches: int = 0,
    continue_command: str = "moe-jax train RECIPE.toml --resume",
    console: rich.console.Console | None = None,
    teacher: ModelSource | None = None,
) -> Path:
    """Runs a recipe; all outputs go to its run directory. Returns the model directory that was written.

    Args:
      source: the model that the recipe names; None if it names only a config, for new weights.
      resume: continue the run in the run directory; without one, a new run starts.
      restart: begin with this checkpoint of another run, `RUN@STEP`; with `resume`, continue a run that was begun so.
      skip_batches: with `restart`: leave out this many batches after the checkpoint.
      continue_command: printed when a signal stops the run.

    Raises:
      InputError: bad input of any kind, found before anything is written; `loop.Diverged` during training.
      OSError: if a disk is full; it has a note that says how to continue.
      loop.Stopped: after SIGTERM, SIGINT or SIGHUP, when the checkpoint is on disk.
    """
    console = console or console_for_tables()
    if not is_first_process():
        console = rich.console.Console(quiet=True)
    given = {"--resume": resume, "--restart": restart and str(restart), "--skip-batches": skip_batches}
    check_equal(comparable(recipe) | given)
    devices = describe_devices()
    if devices is not None:
        console.print(devices, highlight=False)
    with RunLock(as_path(recipe.run_dir)) as lock:
        begun = _read_run(recipe, lock, resume=resume, restart=restart, skip_batches=skip_batches)
        options = {"skip_batches": skip_batches, "continue_command": continue_command}
        try:
            return _train(recipe, config, source, teacher, lock, console, begun, **options)
        except OSError as error:
            if (as_path(recipe.run_dir) / RECORD).exists():
                error.add_note(kept_after(error, recipe, continue_command))
            raise


class _EarlierRun(NamedTuple):
    """A run that is to be continued, or restarted from the checkpoint `origin`.

    Its record of inputs is None if it was interrupted before they were recorded.
    """

    recipe: Recipe
    record: RunRecord | None
    origin: Origin | None = None


def _read_run(
    recipe: Recipe, lock: RunLock, *, resume: bool, restart: Path | None, skip_batches: int
) -> _EarlierRun | None:
    """Returns the run to continue or to restart, as the first process sees it; None: the run is a new one."""
    run_dir = as_path(recipe.run_dir)

    def read() -> list[Any] | None:
        if run_dir.is_dir():
            lock.take() if resume else check_unused(run_dir)
        if restart is not None and not resume:
            find_origin(restart, run_dir)
            before, record = None, None
        else:
            before, record = read_run(run_dir, resume=resume), read_record(run_dir)
        # Checked before data is read and programs are made.
        check_writable(run_dir / RECIPE if run_dir.exists() else run_dir)
        if before is None:
            return None
        return [recipe_toml.to_table(before), None if record is None else dataclasses.asdict(record)]

    found = first_decides(read)
    if found is None:
        if restart is None:
            return None
        first_decides(lambda: find_origin(restart, run_dir) and None)
        origin = find_origin(restart, run_dir)
        return _EarlierRun(origin.recipe, origin.record, origin)
    where, (table, record) = str(run_dir), found
    before = with_horizon(parse(Recipe, table, where=where, language="TOML"))
    begun = _EarlierRun(before, None if record is None else parse(RunRecord, record, where=where, language="JSON"))
    if restart is not None:
        check_restarted(run_dir, begun.record, restart, skip_batches=skip_batches)
    return begun


def _train(
    recipe: Recipe,
    config: ModelConfig,
    source: ModelSource | None,
    teacher: ModelSource | None,
    lock: RunLock,
    console: rich.console.Console,
    begun: _EarlierRun | None,
    *,
    skip_batches: int,
    continue_command: str,
) -> Path:
    run_dir = as_path(recipe.run_dir)
    if begun is not None:
        recipe = with_horizon(recipe, begun.recipe)
        check = check_continues if begun.origin is None else check_restarts
        check(begun.recipe, recipe)
        if begun.origin is not None and recipe.train.steps < begun.origin.step:
            raise InputError(
                f"train.steps = {recipe.train.steps} is fewer than the {begun.origin.step} steps of the checkpoint"
            )
        if begun.origin is None and first_decides(lambda: _is_finished(recipe, run_dir)):
            console.print(
                f"the run is complete: {run_dir / MODEL} is of step {recipe.train.steps}", markup=False, soft_wrap=True
            )
            return run_dir / MODEL
    recipe = with_horizon(recipe)
    if recipe.log.wandb != "off" and is_first_process():
        import_wandb()  # here, before anything is written, if it is missing
    # Data first: mistakes in it are the most likely, and are found before the model is built and tables are printed.
    mesh = mesh_for(recipe, config)
    tokenizer = path_of_tokenizer(recipe, source)
    notes = undivided_experts(config.expert_counts, mesh.shape)
    known = Tokenizer(tokenizer, config).num_tokens
    if known < _USED_OF_VOCABULARY * config.vocab_size:
        counts = f"{tokenizer} knows {known:,} tokens, the model's vocabulary has {config.vocab_size:,}"
        notes.append(f"{counts}: is it this model's?")
    if recipe.data.seq_len > config.max_positions and not config.has_encoder:
        notes.append(f"data.seq_len = {recipe.data.seq_len}: the model was made for {config.max_positions:,} positions")
    if (begun is None or begun.origin is not None) and is_without_checkpoint(run_dir):
        notes.append(f"the run in {run_dir} had saved no checkpoint and begins anew")
    if recipe.log.tensorboard and not has_tensorboard():
        notes.append(NO_TENSORBOARD)
    is_running = False

    def note(line: str) -> None:
        """Keeps a remark for the others, or says it at once: of pictures that are found to be bad later."""
        notes.append(line) if not is_running else _say(console, line)

    tower = _frozen_tower(recipe, source, note)
    if tower is not None and teacher is not None:
        check_tower_of_teacher(tower, teacher)
    batches = open_batches(recipe, config, mesh, tokenizer_files=[tokenizer], tower=tower, note=note)
    held_out, evaluator, eval_len = None, None, recipe.data.seq_len
    if recipe.eval is not None:
        eval_len = recipe.eval.seq_len or eval_len
        held_out = read_held_out(recipe.eval.source, with_lengths(recipe.data, seq_len=eval_len), config, tokenizer)
    features = tower is not None
    program = make_program(recipe, config, features=features, teacher=None if teacher is None else teacher.config)
    print_trained(
        console, program.config, {leaf for path in program.trainable for leaf in disk_paths(program.config, path)}
    )
    last = recipe.schedule.steps
    if recipe.schedule.kind != "constant" and last is not None and last < recipe.train.steps:
        console.print(f"the learning rate does not change after step {last} (schedule.steps)", highlight=False)
    is_running = True
    for line in notes:
        _say(console, line)
    if recipe.eval is not None and held_out is not None:
        on_mesh = {"batch_size": recipe.eval.batch_size, "mesh": program.mesh}
        evaluator = Evaluator(program.graphdef, held_out, seq_len=eval_len, **on_mesh)
    record = make_record(recipe, config, source, tokenizer, teacher)
    check_equal(described_record(record))
    if begun is not None and begun.record is not None:
        check_same(begun.record, record, recipe)
        record = dataclasses.replace(record, restarts=begun.record.restarts)
        if begun.origin is not None:
            record = restart_record(begun.origin, recipe, record, skip_batches=skip_batches)

    def write() -> None:
        if begun is not None and begun.origin is not None:
            clear_unsaved(run_dir, lock)
            write_restart(begun.origin, run_dir, recipe, record)
        lock.take()
        if begun is None:
            read_run(run_dir, resume=False)  # another process may have begun and ended a run there by now
            (run_dir / WANDB_ID).unlink(missing_ok=True)  # of one that had no checkpoint: this is another run
        if begun is None or begun.record is None:
            write_run(run_dir, recipe, record, _files(recipe, source, tokenizer))
        elif begun.origin is None:
            write_run(run_dir, recipe, record)

    copied = None if begun is None or begun.origin is None else begun.origin.step
    first_decides(lambda: require_room(recipe, program, source, copied=copied))
    # All processes have checked everything before the first one writes.
    wait_for_all("run directory checked")
    first_decides(write)
    checkpoints = TrainingCheckpoints(run_dir / CHECKPOINTS, keep=recipe.checkpoint.keep, in_slices=is_saved_by_layer)
    with contextlib.closing(batches), contextlib.closing(checkpoints):
        step = checkpoints.latest_step() if begun is not None and begun.record is not None else None
        if step is None and record.restarts:
            origin = f"{record.restarts[-1].run}@{record.restarts[-1].step}"
            raise InputError(f"{run_dir} has no checkpoint left; restart {origin} with another run_dir")
        if step is None:
            with jax.set_mesh(program.mesh):
                params, frozen = initial_states(program, recipe, source)
                state = first_state(program, params)
        else:
            console.print(f"continuing after step {step}", highlight=False)
            restarted_here = restart_before(record.restarts, step)
            state, frozen = _restore(recipe, program, source, batches, checkpoints, step, restarted_here, console)
        taught = None if teacher is None else load_teacher(program, teacher)
        reports = {"evaluator": evaluator, "console": console, "continue_command": continue_command}
        loop = Loop(recipe, program, frozen=frozen, teacher=taught, batches=batches, checkpoints=checkpoints, **reports)
        state, last = loop.run(state)
    params, steps = averaged_params(state, recipe.ema is not None and recipe.ema.export), int(state.step)
    if not last:  # all steps were done before
        last = first_decides(lambda: _record_of(run_dir, steps))
    del state, loop, taught  # neither moments nor teacher need be kept while the model is written
    model = nnx.merge(program.graphdef, params, frozen)
    model.config = trained_config(config, recipe)
    measured = {"steps": steps} | {key: last[key] for key in ("loss", "eval_loss") if key in last}
    files = files_of_run(run_dir)
    path = write_model(model, recipe, source, files, measured, program.trainable, restarts=record.restarts)
    console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    return path


def _say(console: rich.console.Console, line: str) -> None:
    console.print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)


def _frozen_tower(recipe: Recipe, source: ModelSource | None, note: Callable[[str], object]) -> FrozenTower | None:
    """Returns what keeps the features of pictures in the recipe's `data.feature_cache`; None: it names no folder."""
    folder = cache_folder(recipe.data, "feature_cache")
    if folder is None:
        return None
    if source is None:
        raise InputError("data.feature_cache is for a model whose tower was trained, and this is drawn from a config")
    processing = picture_processing(recipe.data, source.config)
    tower = FrozenTower(source, param_dtype=recipe.model.frozen_dtype, compute_dtype=recipe.model.compute_dtype)
    most, least = int(recipe.data.cache_gib * 2**30), math.prod(tower.shape) * tower.dtype.itemsize
    if most < 2 * least:
        size = f"data.cache_gib = {recipe.data.cache_gib:g}"
        raise InputError(f"{size} is too small: features of one picture take {least:,} bytes")
    tower.keep_in(folder, max_bytes=most, processing=processing, note=note)
    return tower


def _is_finished(recipe: Recipe, run_dir: Path) -> bool:
    """Whether a run has done all its steps, and its model is written as the recipe asks for it.

    Raises `InputError` if the recipe asks for fewer steps than were done.
    """
    done, steps = max(saved_steps(run_dir), default=0), recipe.train.steps
    if steps < done:
        raise InputError(
            f"train.steps = {steps} is fewer than the {done} steps that {run_dir} has done; set it to {done} or more, "
            "or choose another run_dir"
        )
    entry = read_lineage(run_dir / MODEL)[-1:] if (run_dir / MODEL).is_dir() else []
    exports = None if recipe.ema is None else recipe.ema.export
    return steps == done and any(
        one.get("measured", {}).get("steps") == done and one.get("options", {}).get("ema.export") == exports
        for one in entry
    )


def _record_of(run_dir: Path, step: int) -> dict[str, Any]:
    """Returns the metrics of a step that was done before; none if they are lost."""
    records = (record for record in read_metrics(run_dir / METRICS) if isinstance(record, dict))
    return next((record for record in records if record.get("step") == step), {})


def _restore(
    recipe: Recipe,
    program: Program,
    source: ModelSource | None,
    batches: Batches,
    checkpoints: TrainingCheckpoints,
    step: int,
    restart: Restart | None,
    console: rich.console.Console,
) -> tuple[TrainState, nnx.State]:
    """Restores the state of a checkpoint, and the frozen parameters; sets `batches` to the checkpoint's position.

    `restart` is the restart with which the run began, if the checkpoint belongs to the run before: state that the run
    before did not have begins anew, and the batches that it leaves out are skipped.
    """
    with jax.set_mesh(program.mesh):
        frozen = program.frozen
        if restart is None:
            state, extra = checkpoints.restore(step, program.state)
        else:
            wanted = program.state
            if not restart.keeps_moments:
                wanted = wanted._replace(opt_state=())
                console.print("the moments of the optimizer begin anew, at zero", highlight=False)
            if not restart.keeps_average:
                wanted = wanted._replace(ema=None)
                if recipe.ema is not None:
                    console.print("the average begins with the parameters of the checkpoint", highlight=False)
            state, extra = checkpoints.restore(step, wanted, part=True)
            state = completed_state(program, state)
        if jax.tree.leaves(frozen):
            # Frozen parameters are not in the checkpoints: they are those of the source.
            _, frozen = initial_states(program, recipe, source)
    skipped = 0 if restart is None else restart.skipped_batches
    if skipped:
        console.print(f"skipping {skipped} batches", highlight=False)
    batches.seek(extra["data"], skip=skipped)
    return state, frozen


def path_of_tokenizer(recipe: Recipe, source: ModelSource | None) -> Path:
    """Returns the tokenizer.json that a recipe names, or its model has; raises `InputError` if there is none."""
    if recipe.data.tokenizer is not None:
        return as_path(recipe.data.tokenizer)
    if source is None:
        raise InputError("a model made from a config alone has no tokenizer: name one with data.tokenizer")
    return find_tokenizer(source.tokenizer_files, source.path)


def _files(recipe: Recipe, source: ModelSource | None, tokenizer: Path) -> dict[str, Path]:
    """Returns the files of the trained model, by name: those of its source, with the tokenizer of the run."""
    own = () if source is None else source.tokenizer_files
    files = by_name(own) if recipe.data.tokenizer is None else with_tokenizer(own, tokenizer)
    return (
        files
        if recipe.data.chat_template is None
        else files | {CHAT_TEMPLATE: template_file(recipe.data.chat_template)}
    )
