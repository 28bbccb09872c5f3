"""Does one entry after another and keeps every result at once."""

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from evidence.results import NoSettings, ResultsFile
from evidence.whole_models.entries import ENTRIES, LLAMA_CPP, WHOLE, Entry
from evidence.whole_models.scores import scores
from evidence.whole_models.stored import stored_bytes
from evidence.whole_models.task import DRAWS, RefusedError, Task

NAME = "whole_models"
MODELS = "models"
REFUSED = "refused"
TRAINING = "training"
SAME = 0.02
"""The share by which the losses of two trainings of one model may differ."""
ALIKE = 0.003
"""Nats per token by which they may, so that entries of both stand beside each other in the first draw."""


class WholeModelsFile(ResultsFile):
    """`OUT/whole_models.json`: under `models`, by model, entry and draw, what `measured` gives, and `training`: the
    number of the training of its model, if it is not the first. The whole model lies by the number of the training."""

    names_at: ClassVar[dict[str, int]] = {MODELS: 1}

    def __init__(self, folder: Path, *, writes: bool = False):
        """Opens the file in a folder; one that is not there yet is made if the program `writes`."""
        super().__init__(folder / f"{NAME}.json", NoSettings() if writes else None)


def do_entries(
    tasks: Sequence[Task], results: WholeModelsFile, *, only: Sequence[str] | None, draws: int, until: float
) -> bool:
    """Does what is not done: of every model the first draw of all entries, then the second, and so on.

    What is not calibrated has one draw of every training of the model.

    Args:
      tasks: the models, the most important first.
      results: what is done; every result is stored as soon as it is there.
      only: labels of entries; None: all.
      draws: how many, at most those of `DRAWS`.
      until: no entry is begun after this `time.monotonic()`.

    Returns:
      Whether nothing is left to do.
    """
    for draw in DRAWS[:draws]:
        for task in tasks:
            training = _training(task, results)
            for entry in _open(task, results, only, draw):
                if time.monotonic() > until:
                    return False
                label, number = (WHOLE, training) if entry is None else (entry.label, draw)
                found = measured(task, entry, draw, results)
                if entry is None:
                    _check_same_model(task, found, results)
                elif training:
                    found[TRAINING] = training
                results.put(MODELS, task.name, label, str(number), value=found)
                print(f"{task.name}, {label}, draw {draw}: {_line(found)}", flush=True)
    return True


def _training(task: Task, results: WholeModelsFile) -> int:
    """Returns the number of the training that a model is of.

    The same steps give another model on a processor that rounds sums otherwise, as another seed would, and one machine
    does not keep a model for another. So the results of a model may be of several trainings. Each has its whole model,
    and only what is added to the loss of that is compared.
    """
    wholes = results.get(MODELS, task.name, WHOLE) or {}
    known = [whole["fingerprint"] for whole in wholes.values()]
    return known.index(task.fingerprint) if task.fingerprint in known else len(known)


def _check_same_model(task: Task, whole: dict[str, Any], results: WholeModelsFile) -> None:
    """Raises `SystemExit` if a whole model is no training of the model that results are there of."""
    first = results.get(MODELS, task.name, WHOLE, "0") or whole
    other_shape = any(whole[key] != first[key] for key in ("weights", "experts"))
    if other_shape or any(abs(loss / first["losses"][text] - 1) > SAME for text, loss in whole["losses"].items()):
        raise SystemExit(f"the results of {task.name} are of another model than {task.model}; take them out first")


def _is_like_the_first(task: Task, training: int, results: WholeModelsFile) -> bool:
    """Whether a training loses as much as the first one did."""
    first, own = (results.get(MODELS, task.name, WHOLE, str(number))["losses"] for number in (0, training))
    return all(abs(own[text] - loss) <= ALIKE for text, loss in first.items())


def _open(task: Task, results: WholeModelsFile, only: Sequence[str] | None, draw: int) -> Iterator[Entry | None]:
    """Entries that are not done; None stands for the model as it is."""
    training = _training(task, results)
    if results.get(MODELS, task.name, WHOLE, str(training)) is None:
        yield None
    if not draw and not _is_like_the_first(task, training, results):
        return  # the first draw is compared window by window
    for entry in ENTRIES:
        if only is not None and entry.label not in only:
            continue
        runs = results.get(MODELS, task.name, entry.label) or {}
        needed = entry.calibrated or training not in {run.get(TRAINING, 0) for run in runs.values()}
        if needed and str(draw) not in runs and REFUSED not in runs.get("0", {}):
            if entry.beside is None or _room(task, entry, results):
                yield entry


def _room(task: Task, entry: Entry, results: WholeModelsFile) -> int:
    """The bytes that an entry may have; 0: those of what it stands beside are not known."""
    return results.get(MODELS, task.name, entry.beside or "", "0", "bytes") or 0


def measured(task: Task, entry: Entry | None, draw: int, results: WholeModelsFile) -> dict[str, Any]:
    """Makes a model and scores it.

    Returns:
      bytes: of its tensors as stored. bits_per_weight: of the whole model. seconds: that it took to make. room: the
      bytes that it was to have at most, if any. note: versions of what made it. What `scores` gives; of later draws no
      windows and no prompts. Or `refused` alone: why there is no such model.
    """
    if entry is None:
        path, about = task.model, {"weights": task.weights, "experts": task.experts, "sizes": vars(task.sizes)}
        about["fingerprint"] = task.fingerprint
        return _sized(task, path) | about | scores(task, path, asked=True)
    target, start = task.work / ("entry.gguf" if entry.whose == LLAMA_CPP else "entry"), time.monotonic()
    _remove(target)
    room = _room(task, entry, results)
    try:
        note = entry.make(task, target, draw, room)
    except RefusedError as error:
        return {REFUSED: str(error)}
    seconds = round(time.monotonic() - start, 1)
    found = _sized(task, target) | {"seconds": seconds, "note": note} | ({"room": room} if room else {})
    found |= scores(task, target, probes=draw == 0, asked=draw == 0 and entry.asked)
    if draw:
        del found["window_losses"], found["window_kl"]
    _remove(target)
    return found


def _sized(task: Task, path: Path) -> dict[str, Any]:
    nbytes = stored_bytes(path)
    return {"bytes": nbytes, "bits_per_weight": 8 * nbytes / task.weights}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _line(found: dict[str, Any]) -> str:
    if REFUSED in found:
        return found[REFUSED]
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in found["losses"].items())
    return f"{found['bits_per_weight']:.3f} bits per weight, {losses}, KL {sum(found['kl'].values()) / 3:.4f}"
