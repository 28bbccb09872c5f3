"""Restarts a run from one of its checkpoints, with other optimizer settings or without some of its batches.

A restart is a run of its own: its directory begins with a copy of the checkpoint, and the run that it came from is not
changed. Runs on disks save arrays into a database, runs in buckets into files, and a checkpoint that is copied into a
bucket gets files, too. The arrays of a checkpoint in a bucket are copied by the names that their metadata imply, and
not only by what a listing shows: a chunk that is missing from a copy would be read as zeros.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore

from moe_jax.checkpoints.saved_state import begin_with
from moe_jax.core.errors import InputError
from moe_jax.files.byte_files import open_bytes, size_of
from moe_jax.files.remote_work import is_begun
from moe_jax.files.staging import PARTIAL, require_space, staged_directory
from moe_jax.files.storage_path import StoragePath, as_path
from moe_jax.files.tokenizer_files import by_name
from moe_jax.model_io.model_names import split_step
from moe_jax.training.recipe import Recipe, load_recipe
from moe_jax.training.run_directory import (
    CHECKPOINTS,
    METRICS,
    RECIPE,
    RECORD,
    Restart,
    RunRecord,
    changed_keys,
    check_saved,
    files_of_run,
    is_without_checkpoint,
    read_record,
    saved_steps,
    with_horizon,
    write_run,
)

_STATE = "state"
_AT_ONCE = 4  # files: each is in memory as a whole
_METADATA = f"{_STATE}/_METADATA"
_FIXED = ("_CHECKPOINT_METADATA", _METADATA)
_DATABASE = f"{_STATE}/manifest.ocdbt"
_OF_DATABASE = re.compile(rf"{_STATE}/(manifest\.ocdbt|d/.*|ocdbt\.process_.*)")
_METADATA_OF_ARRAYS = f"{_STATE}/array_metadatas"


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copies the folder of a complete checkpoint to a place where nothing is.

    Raises `InputError` if something of it is missing, `OSError` if a disk is full or a bucket does not answer.
    """
    source, target = as_path(source), as_path(target)
    database = not target.renames and (source / _DATABASE).is_file()  # one that is written piece by piece
    reads = _reads_of_database(source) if database else _reads_of_files(source)
    names = sorted(reads)
    folders = sorted({parent.as_posix() for name in names for parent in Path(name).parents})
    for folder in folders:
        (target / folder).mkdir(parents=True, exist_ok=True)
        if folder.count("/") == 0 or folder == _METADATA_OF_ARRAYS:
            (target / folder).mark_folder()

    def copy(name: str) -> None:
        (target / name).write_durably(reads[name]())

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(copy, names))
    for folder in reversed(folders):
        (target / folder).sync()


def bytes_of_checkpoint(source: Path) -> int:
    """Returns the number of bytes of a checkpoint's files; where its arrays are files, their uncompressed bytes."""
    source = as_path(source)
    if (source / _DATABASE).is_file():
        return sum(size_of(source / name) for name in source.files_below())
    bits = ((array, re.sub(r"\D", "", array["data_type"]) or 8) for _, array in _arrays(source))
    return sum(math.prod(array["shape"]) * max(1, int(size) // 8) for array, size in bits)


def _reads_of_files(source: StoragePath) -> dict[str, Callable[[], bytes]]:
    """Returns a function to read each file, by the file's name."""

    def read(name: str) -> bytes:
        with open_bytes(source / name) as file:
            return file.read()

    names = source.files_below() if (source / _DATABASE).is_file() else _names_of_arrays(source)
    return {name: partial(read, name) for name in names}


def _reads_of_database(source: StoragePath) -> dict[str, Callable[[], bytes]]:
    """Returns a function to read each file that the arrays would have outside a database, by the file's name."""
    beside = {name: read for name, read in _reads_of_files(source).items() if not _OF_DATABASE.match(name)}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": (source / _STATE).kvstore()}).result()
    keys = [key.decode() for key in store.list().result()]
    tree = json.loads((source / _METADATA).read_bytes()) | {"use_ocdbt": False}

    def value(key: str) -> bytes:
        return store.read(key).result().value

    values = {f"{_STATE}/{key}": partial(value, key) for key in keys}
    return beside | values | {_METADATA: json.dumps(tree).encode}


def _names_of_arrays(source: StoragePath) -> list[str]:
    listed, known = set(source.files_below()), set(_FIXED)
    for name, array in _arrays(source):
        known |= {f"{_STATE}/{name}/{file}" for file in ("zarr.json", *_chunks(array))}
    optional = ("commit_success.txt", "orbax.checkpoint", f"{_STATE}/_sharding")
    known |= {name for name in optional if (source / name).is_file()}
    processes = (f"{_METADATA_OF_ARRAYS}/process_{process}" for process in itertools.count())
    known |= set(itertools.takewhile(lambda name: (source / name).is_file(), processes))
    unseen = sorted(known - listed)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        there = list(pool.map(lambda name: (source / name).is_file(), unseen))
    missing = [name for name, is_there in zip(unseen, there, strict=True) if not is_there]
    if missing:
        raise InputError(f"{source} is not complete: {missing[0]} is missing")
    return sorted(known | listed)


def _arrays(source: StoragePath) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the arrays of a checkpoint with their metadata."""
    try:
        tree = json.loads((source / _METADATA).read_bytes())
        names = ["/".join(part["key"] for part in leaf["key_metadata"]) for leaf in tree["tree_metadata"].values()]

        def read(name: str) -> dict[str, Any]:
            file = f"{_STATE}/{name}/zarr.json"
            if not (source / file).is_file():
                raise InputError(f"{source} is not complete: {file} is missing")
            return json.loads((source / file).read_bytes())

        yield from zip(names, source.map(read, names), strict=True)
    except InputError:
        raise
    except (FileNotFoundError, KeyError, TypeError, AttributeError, ValueError):
        raise InputError(f"{source} is damaged: its metadata do not say which arrays it has") from None


def _chunks(array: dict[str, Any]) -> Iterator[str]:
    """Returns the names of the chunks of an array."""
    chunk = array["chunk_grid"]["configuration"]["chunk_shape"]
    counts = [range(-(-axis // part)) for axis, part in zip(array["shape"], chunk, strict=True)]
    return ("/".join(["c", *map(str, index)]) for index in itertools.product(*counts))


class Origin(NamedTuple):
    """The checkpoint of a run, of a step of it, that another run begins with; recipe and record are the first run's."""

    run_dir: Path
    step: int
    recipe: Recipe
    record: RunRecord


def find_origin(saved: Path, run_dir: Path) -> Origin:
    """Finds the checkpoint `RUN@STEP`, for a run that is to be written at `run_dir`.

    Raises `FileNotFoundError` if there is no run, `InputError` if it has no such checkpoint, `saved` has another form,
    or there is something at `run_dir` but a run that had saved no checkpoint.
    """
    parts = split_step(saved)
    if parts is None:
        raise InputError(f"cannot restart from {saved}: expected RUN@STEP, as in run@500")
    # In a bucket, the remains of an interrupted restart are where the run will be.
    is_run = (run_dir / RECORD).is_file()
    begun = not is_run and is_begun(as_path(run_dir), PARTIAL)
    is_there = (is_run and not is_without_checkpoint(run_dir)) or (not is_run and run_dir.exists() and not begun)
    if is_there or run_dir.is_symlink():
        raise InputError(f"{run_dir} already exists, and a restart is a new run; choose another run_dir")
    record = check_saved(*parts)
    return Origin(*parts, with_horizon(load_recipe(parts[0] / RECIPE)), record)


def check_restarted(run_dir: Path, record: RunRecord | None, saved: Path, *, skip_batches: int) -> None:
    """Raises `InputError` unless the run at `run_dir` began with the checkpoint `RUN@STEP`, without those batches.

    A run that is not where it was may be under another name now.
    """
    parts, last = split_step(saved), record.restarts[-1] if record is not None and record.restarts else None
    if last is None:
        raise InputError(f"{run_dir} was not begun with {saved}; leave out --restart, or choose another run_dir")
    is_other = parts is not None and str(parts[0].resolve()) != last.run and read_record(as_path(last.run)) is not None
    if parts is None or is_other or (last.step, last.skipped_batches) != (parts[1], skip_batches):
        raise InputError(
            f"{run_dir} was begun with {last.run}@{last.step} without {last.skipped_batches} batches, and not with "
            f"{saved} without {skip_batches}; leave out --restart, or choose another run_dir"
        )


def restart_record(origin: Origin, recipe: Recipe, record: RunRecord, *, skip_batches: int) -> RunRecord:
    """Returns the record of a run with these inputs that begins with a checkpoint, without so many batches after it."""
    changed = {key: list(pair) for key, pair in changed_keys(origin.recipe, recipe).items()}
    place = str(origin.run_dir.resolve())
    restart = Restart(run=place, step=origin.step, skipped_batches=skip_batches, changed=changed)
    return dataclasses.replace(record, restarts=(*origin.record.restarts, restart))


def write_restart(origin: Origin, run_dir: Path, recipe: Recipe, record: RunRecord) -> None:
    """Makes the directory of a run that has come as far as the checkpoint; it appears whole or not at all.

    In a bucket it counts once its record is there, which is written last. Raises `InputError` if something has appeared
    at `run_dir`, or the disk has not enough space.
    """
    saved = saved_steps(origin.run_dir)[origin.step]
    require_space(run_dir, bytes_of_checkpoint(saved))
    with staged_directory(run_dir) as folder:
        # The loop removes the records of later steps.
        (folder / METRICS).write_grown(as_path(origin.run_dir / METRICS).read_grown())
        begin_with(folder / CHECKPOINTS, origin.step, lambda target: copy_checkpoint(saved, target))
        write_run(folder, recipe, record, by_name(files_of_run(origin.run_dir)))
