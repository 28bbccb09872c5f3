"""The run directory: the outputs of a run, and everything needed to continue it.

    recipe.toml      the recipe as resolved, overrides included
    run.json         the inputs of the run, identified by content, so that run, model and data can be moved
    tokenizer/       the tokenizer's files, and others that go with the model
    checkpoints/     the last few training checkpoints
    metrics.jsonl    one line per step
    tensorboard/     the same as events
    profile/         a profiler trace, if the recipe asks for one
    wandb/, wandb_id files of Weights & Biases, likewise
    model/           a model directory, at the end

While a process works on the run it holds a lock on the directory, and `.lock` says which process that is. In a bucket
`.lock` is a lease, checkpoints/steps.json lists the checkpoints, and the files of Weights & Biases are elsewhere.

A run is continued or restarted where certain keys of its recipe, and the contents of its files, are equal.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_jax.checkpoints.saved_state import read_steps
from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.data.sections import at_least
from moe_jax.data.sources import find_files
from moe_jax.data.tokenizer import tokenizer_identity
from moe_jax.files.byte_files import fingerprint_contents
from moe_jax.files.json_toml import parse, read_json_object, without_format
from moe_jax.files.staging import check_not_held, hold_alone
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.files.tokenizer_files import copy_tokenizer_files, tokenizer_files_in
from moe_jax.model_io.adapter_dir import ModelReference
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig, config_to_json
from moe_jax.training import recipe_toml
from moe_jax.training.recipe import Recipe, load_recipe

RECIPE = "recipe.toml"
RECORD = "run.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
_TOKENIZER = "tokenizer"
_HOLDER = ".lock"
_FORMAT = "moe_jax.run"
_VERSION = 1


class RunLock(contextlib.ExitStack):
    """Keeps all other processes out of a run directory, from `take` to the end of the block.

    In a run with several processes the first one holds the lock.
    """

    def __init__(self, run_dir: Path):
        super().__init__()
        self._run_dir, self._is_held = as_path(run_dir), False

    def take(self) -> None:
        """Locks the directory, which is created if necessary; does nothing if the lock is held already.

        Raises `InputError` if another process holds the lock, and says which. In a bucket that is a lease: one that
        nobody renews any more is waited for.
        """
        if not self._is_held:
            self.callback(hold_alone(self._run_dir, _HOLDER).release)
            self._is_held = True

    def release(self) -> None:
        """Gives the lock back before the end of the block; it can be taken again."""
        self.close()
        self._is_held = False


def check_unused(run_dir: Path) -> None:
    """Raises `InputError` if another process works on the run in a directory; the message says which."""
    check_not_held(as_path(run_dir), _HOLDER)


def read_run(run_dir: Path, *, resume: bool) -> Recipe | None:
    """Returns the recipe of the run in a directory; None if there is none, or one that has nothing to continue from.

    Writes nothing. Raises `InputError` if `run_dir` exists and is not to be continued, or is not a run.
    """
    # In a bucket, the listing that shows whether something exists may be late.
    if not (run_dir / RECIPE).is_file() and not run_dir.exists() and not run_dir.is_symlink():
        return None
    if run_dir.is_dir() and all(child.name == _HOLDER for child in run_dir.iterdir()):
        return None
    if is_without_checkpoint(run_dir):
        return None
    if not resume:
        raise InputError(f"{run_dir} already exists; continue it with --resume, or choose another run_dir")
    if not (run_dir / RECIPE).is_file():
        raise InputError(f"{run_dir} is not a training run: it has no {RECIPE}; choose another run_dir")
    if not (run_dir / RECORD).is_file() and any((run_dir / CHECKPOINTS).glob("*")):
        raise InputError(f"{run_dir} has checkpoints, but no {RECORD} that says of what; start a new run")
    return load_recipe(run_dir / RECIPE)


def is_without_checkpoint(run_dir: Path) -> bool:
    """Whether there is a run that ended before its first checkpoint: nothing is lost if it begins anew."""
    record = read_record(run_dir)
    if record is None or record.restarts or (run_dir / MODEL).exists():
        return False
    return not saved_steps(run_dir)


def clear_unsaved(run_dir: Path, lock: RunLock) -> None:
    """Removes a run that ended before its first checkpoint, if there is one, so that another can take its place."""
    if is_without_checkpoint(run_dir):
        lock.take()
        if is_without_checkpoint(run_dir):
            as_path(run_dir).remove_tree()
        lock.release()


def saved_steps(run_dir: Path) -> Mapping[int, Path]:
    """Returns the folders of the checkpoints of a run by step, ascending."""
    return read_steps(as_path(run_dir) / CHECKPOINTS)


def describe_run(path: Path) -> str | None:
    """Returns what to give instead of a run directory where a model is expected; None if it is no run directory."""
    if not (path / RECIPE).is_file() or not (path / RECORD).is_file():
        return None
    steps = saved_steps(path)
    places = [str(path / MODEL)] if (path / MODEL).exists() or not steps else []
    places += [f"{path}@STEP for a checkpoint of step {', '.join(map(str, steps))}"] if steps else []
    return f"{path} is a training run and not a model; give {', or '.join(places)}"


def check_saved(run_dir: Path, step: int) -> "RunRecord":
    """Returns the record of a run that has a checkpoint of this step.

    Raises:
      FileNotFoundError: if there is no run.
      InputError: if it has no such checkpoint, or its record cannot be read.
    """
    record = read_record(run_dir)
    if record is None:
        raise FileNotFoundError(f"no training run at {run_dir}: there is no {RECORD}{nearest_path(run_dir)}")
    steps = saved_steps(run_dir)
    if step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise InputError(f"{run_dir} has no checkpoint of step {step}; it has {listed}")
    return record


def write_run(run_dir: Path, recipe: Recipe, record: "RunRecord", files: Mapping[str, Path] | None = None) -> None:
    """Writes the recipe of a run as resolved, its files, and last its record.

    `files` go with the model, by name, and replace those of a beginning that was interrupted; None: the run has them.
    """
    as_path(run_dir / RECIPE).replace_content(recipe_toml.to_toml(recipe).encode())
    if files is not None:
        folder = as_path(run_dir / _TOKENIZER)
        folder.remove_tree()
        folder.mkdir()
        copy_tokenizer_files(files, folder)
    write_record(run_dir, record)


def files_of_run(run_dir: Path) -> tuple[Path, ...]:
    """Returns the files that go with the model of a run: its tokenizer's, and others."""
    return tokenizer_files_in(run_dir / _TOKENIZER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
    """The record that a run began with a checkpoint of another run, at the path `run`.

    So many batches were left out after it, and keys of the recipe `changed`: key -> value before and after.
    """

    run: str
    step: int
    skipped_batches: int
    changed: Mapping[str, Any]

    def __post_init__(self) -> None:
        at_least(self, 0, "step", "skipped_batches")

    @property
    def keeps_moments(self) -> bool:
        """Whether the optimizer goes on from the state in the checkpoint, and does not begin anew."""
        return not any(key in self.changed for key in _KINDS_OF_MOMENTS)

    @property
    def keeps_average(self) -> bool:
        """Whether the average of the parameters goes on from that in the checkpoint, if the recipe asks for one."""
        before, _ = self.changed.get("ema.decay", (0.0, 0.0))
        return before is not None


def restart_before(restarts: Sequence[Restart], step: int) -> Restart | None:
    """Returns what changed between the run that wrote a checkpoint and the run that has it now, by the latter's record.

    A restarted run begins with a copy of another run's checkpoint, and a restart from that step copies it once more:
    then what all of these runs left out and changed counts. None: the run has written the checkpoint itself.
    """
    copies = list(itertools.takewhile(lambda restart: restart.step == step, reversed(restarts)))[::-1]
    if not copies:
        return None
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for restart in copies:
        for key, (before, after) in restart.changed.items():
            first.setdefault(key, before)
            last[key] = after
    changed = {key: (first[key], last[key]) for key in first if first[key] != last[key]}
    skipped = sum(restart.skipped_batches for restart in copies)
    return dataclasses.replace(copies[-1], skipped_batches=skipped, changed=changed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The inputs of a run, identified by content.

    Attributes:
      source: the model that the recipe names; None if it names only a config.
      config: of the model, from `config_to_json`.
      tokenizer: a SHA-256 of the tokenizer.
      data: SHA-256s of the files of every source, sampled as in `fingerprint`.
      restarts: the last one is this run's, the others are those of the run that it began with.
      teacher: the model whose logits are distilled; None: there is none.
    """

    source: ModelReference | None
    config: Mapping[str, Any]
    tokenizer: str
    data: tuple[str, ...]
    restarts: tuple[Restart, ...] = ()
    teacher: ModelReference | None = None


def make_record(
    recipe: Recipe, config: ModelConfig, source: ModelSource | None, tokenizer: Path, teacher: ModelSource | None = None
) -> RunRecord:
    """Makes the record of a run that begins now. Reads samples of all files."""
    run_dir = as_path(recipe.run_dir)
    return RunRecord(
        source=None if source is None else ModelReference.to(source, run_dir),
        config=json.loads(json.dumps(config_to_json(config))),
        tokenizer=tokenizer_identity(tokenizer, recipe.data.chat_template),
        data=tuple(fingerprint_contents(find_files(section.path)) for section in recipe.data.sources),
        teacher=None if teacher is None else ModelReference.to(teacher, run_dir),
    )


def read_record(run_dir: Path) -> RunRecord | None:
    """Reads the record in a run directory; None if the run was not begun. Raises `InputError` if it is damaged."""
    file = as_path(run_dir) / RECORD
    if not file.is_file():
        return None
    fields = without_format(read_json_object(file, allow=("nonfinite",)), _FORMAT, _VERSION, where=str(file))
    return parse(RunRecord, fields, where=str(file), language="JSON")


def write_record(run_dir: Path, record: RunRecord) -> None:
    """Writes the record into a run directory."""
    content = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(record)}
    as_path(run_dir / RECORD).replace_content(json.dumps(content, indent=2).encode())


# Keys that may differ between a run and its continuation, because they do not change what a step computes. (Another
# mesh sums in another order, so the last bits may differ; restoring onto it is a feature.)
CHANGEABLE = (
    "train.steps", "checkpoint.", "log.", "eval", "mesh.", "data.prefetch", "data.feature_cache",
    "data.pixel_cache", "data.cache_gib", "ema.evaluate", "ema.export",
)  # fmt: skip
# Paths may differ too: `RunRecord` compares the contents of the files.
_PLACES = (
    "run_dir", "model.path", "model.base", "model.config", "data.tokenizer", "data.chat_template", "data.image_folder",
    "distill.teacher",
)  # fmt: skip

# Keys that a restart may also change.
_RESTARTABLE = ("optimizer.", "schedule.", "ema.")
# If one of these differs, the optimizer's state in a checkpoint is useless.
_KINDS_OF_MOMENTS = ("optimizer.kind", "optimizer.moments")


def with_horizon(recipe: Recipe, before: Recipe | None = None) -> Recipe:
    """Returns the recipe with `schedule.steps` filled in: as given, from the continued run, or from `train.steps`."""
    steps = recipe.schedule.steps
    if steps is None:
        begun = before or recipe
        steps = begun.schedule.steps or begun.train.steps
    return dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, steps=steps))


def changed_keys(before: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """Returns the keys that change what a step computes and differ, with their values before and now."""
    old, new = comparable(before), comparable(now)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(CHANGEABLE)
    }


def check_continues(before: Recipe, now: Recipe) -> None:
    """Raises `InputError` if `now` differs from the run it continues in keys that must not change; names them."""
    if changed := changed_keys(before, now):
        restartable = all(key.startswith(_RESTARTABLE) for key in changed)
        instead = "begin a new run with --restart" if restartable else "choose another run_dir"
        raise InputError(
            f"cannot continue {now.run_dir} with a changed recipe: {_in_words(changed)}; undo the change, or {instead}"
        )


def check_restarts(before: Recipe, now: Recipe) -> None:
    """Raises `InputError` if `now` differs from the run it restarts in keys other than the optimizer's."""
    changed = {key: pair for key, pair in changed_keys(before, now).items() if not key.startswith(_RESTARTABLE)}
    if changed:
        raise InputError(
            f"cannot restart with a changed recipe: {_in_words(changed)}; a restart may change optimizer, schedule and "
            "ema"
        )


def comparable(recipe: Recipe) -> dict[str, Any]:
    """Returns keys and values without paths, but with the formats of sources, which follow from the paths.

    All processes of a run must share them.
    """
    sources = [
        {"format": source.form, "weight": source.weight, "separator": source.separator}
        | ({"fields": dataclasses.asdict(source.fields)} if source.fields else {})
        | ({"chat": True} if source.chat else {})
        for source in recipe.data.sources
    ]
    flat = {key: value for key, value in recipe_toml.flatten(recipe).items() if key not in _PLACES}
    return flat | {"data.sources": sources}


def _in_words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} (was {shown(old)}, is {shown(new)})" for key, (old, new) in changed.items())


def described_record(record: RunRecord) -> dict[str, Any]:
    """Returns the identities of a run's inputs, which all processes of a run must share."""
    described: dict[str, Any] = {f"the content of data.sources[{i}]": sha for i, sha in enumerate(record.data)}
    described |= {"the tokenizer": record.tokenizer, "the model's config": record.config}
    return described | {"the model": _identity(record.source), "the teacher": _identity(record.teacher)}


def check_same(before: RunRecord, now: RunRecord, recipe: Recipe) -> None:
    """Raises `InputError` unless a run continues with the same model, tokenizer and data; names what changed."""
    problems = []
    model = recipe.model.path or recipe.model.config
    if _identity(before.source) != _identity(now.source):
        problems.append(f"{model} is not the model that it was begun with")
    elif before.config != now.config:
        problems.append(f"{model} describes another model than at its beginning")
    if recipe.distill is not None and _identity(before.teacher) != _identity(now.teacher):
        problems.append(f"{recipe.distill.teacher} is not the teacher that it was begun with")
    if before.tokenizer != now.tokenizer:
        problems.append(f"{recipe.data.tokenizer or 'the tokenizer of the model'} is not the tokenizer that it had")
    problems += [
        f"{section.path} holds other data than at its beginning"
        for section, old, new in zip(recipe.data.sources, before.data, now.data, strict=False)
        if old != new
    ]
    raise_if_any(problems, f"cannot continue {recipe.run_dir}: put back what was there, or choose another run_dir")


def _identity(reference: ModelReference | None) -> str | None:
    return None if reference is None else reference.fingerprint
