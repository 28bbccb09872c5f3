"""Subjects of a report: paths of any kind, recognised and read, but for weights."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.figures import ExpertUse, LayerSimilarity
from moe_jax.figures.expert_use import MOST_PICTURES
from moe_jax.figures.plots import NUMBERS
from moe_jax.figures.use_plots import PATCHES
from moe_jax.files.json_toml import ANYTHING, parse, read_json
from moe_jax.files.regular_files import read_regular
from moe_jax.files.staging import check_model_path
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.model_io.model_names import split_step
from moe_jax.training.metrics import Record, read_metrics
from moe_jax.training.run_directory import METRICS, MODEL, RECIPE, describe_run, saved_steps

if TYPE_CHECKING:
    from moe_jax.compression import Sweep
    from moe_jax.model_io.model_source import ModelSource

_SWEEP = "sweep.json"
_MAX_RECIPE_BYTES = 1 << 20
_MAX_PNG_BYTES = 1 << 23
_MOST_COUNTED = 1 << 53
_PNG = b"\x89PNG\r\n\x1a\n"
_EXPECTED = (
    "expected a model, an adapter directory, a training run, a folder of `compress --sweep` or of `inspect --plots`, "
    "or an evaluation as JSON (`eval --json` or `--output`)"
)


class Score(NamedTuple):
    """One figure of a task: perhaps with a standard error or a 95% interval, and the count of examples or tokens.

    A text or labelled texts are named by their file (`is_of_file`).
    """

    task: str
    metric: str
    value: float
    error: float | None = None
    count: int | None = None
    interval: tuple[float, float] | None = None
    is_of_file: bool = False


class Evaluation(NamedTuple):
    """An evaluation of a model, a path or a name, as the file at `path` holds it.

    Of a classification there are the names of the labels, and how often a label (row) was given which (column).
    """

    path: Path
    model: str
    scores: tuple[Score, ...]
    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: its recipe as resolved, TOML, records of its steps (`training.metrics`), and its checkpoints."""

    recipe: str
    records: Sequence[Record]
    checkpoints: Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of `inspect --plots`, of which there may be none of a kind.

    `shares` are by layer index, of the assignments per expert, measured on `text`. `use` is of tokens of pictures and
    of others, without what was seen of pictures: `patches` are PNG files that show that.
    """

    model: str
    layers: Sequence[LayerSimilarity]
    shares: dict[int, Float[np.ndarray, " E"]]
    text: str | None
    use: ExpertUse | None = None
    patches: Sequence[bytes] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """One path, and what it is in words. What it does not have is None, or empty.

    `model` is the one at the path, or the one that a run has made; `evaluations` are of that, or the one at the path.
    """

    path: Path
    name: str = ""
    kind: str
    model: "ModelSource | None" = None
    run: Run | None = None
    sweep: "Sweep | None" = None
    sweep_entry: dict[str, Any] | None = None
    measured: Measured | None = None
    evaluations: tuple[Evaluation, ...] = ()


def open_subject(path: Path | str, *, base: Path | None = None) -> Subject:
    """Recognises what lies at a path and reads it; the weights of a model stay on the disk.

    Args:
      path: see `Subject`; a model may be anything that `open_source` takes.
      base: where the model is now that this one stands on, if it stands on one and that was moved.

    Raises:
      FileNotFoundError: if there is nothing at `path`.
      InputError: if it is nothing of the kind, or cannot be read.
    """
    check_model_path(path)
    path = as_path(path)
    if path.is_file() and path.suffix.lower() != ".gguf":
        return _of_json(path, path)
    if not path.is_dir():
        if path.suffix == ".json":
            raise FileNotFoundError(f"there is nothing at {path}{nearest_path(path)}")
        return _of_model(path, base)
    if describe_run(path) is not None:
        return _of_run(path, base)
    for name in (_SWEEP, NUMBERS):
        if (path / name).is_file():
            return _of_json(path, path / name)
    if not (path / "config.json").exists():
        raise InputError(f"{path} is nothing that a report can show; {_EXPECTED}")
    return _of_model(path, base)


def named(subjects: Sequence[Subject]) -> list[Subject]:
    """The subjects, each with a name: the last part of its path, or as many as tell it from the others."""
    names = _short([subject.path.resolve() for subject in subjects])
    return [dataclasses.replace(subject, name=name) for subject, name in zip(subjects, names, strict=True)]


def _short(paths: Sequence[Path]) -> list[str]:
    """The last part of every path, or as many as tell it from the others."""
    parts, names = [path.parts for path in paths], []
    for own in parts:
        alike = [other for other in parts if other != own]
        length = next(n for n in range(1, len(own) + 1) if n == len(own) or all(own[-n:] != o[-n:] for o in alike))
        names.append("/".join(own[-length:]))
    return names


def _with_short_files(subjects: Sequence[Subject]) -> list[Subject]:
    """The subjects, whose evaluations name the files that they are on as shortly as tells them apart."""
    every = [score for subject in subjects for one in subject.evaluations for score in one.scores if score.is_of_file]
    short = dict(zip((score.task for score in every), _short([Path(score.task) for score in every]), strict=True))

    def shortened(one: Evaluation) -> Evaluation:
        return one._replace(scores=tuple(s._replace(task=short.get(s.task, s.task)) for s in one.scores))

    return [dataclasses.replace(one, evaluations=tuple(map(shortened, one.evaluations))) for one in subjects]


def with_evaluations(subjects: Sequence[Subject]) -> list[Subject]:
    """The subjects, with evaluations of a model among them beside that model and no subjects of their own."""
    models: dict[Path | None, Subject] = {
        subject.path.resolve(): subject for subject in subjects if subject.model is not None
    }
    # The model that a run has made is asked for as `RUN/model`.
    models |= {(subject.path / MODEL).resolve(): subject for subject in subjects if subject.run is not None}
    of: dict[int, list[Evaluation]] = {}
    rest = []
    for subject in subjects:
        found = models.get(_place(subject.evaluations[0].model)) if subject.evaluations else None
        if found is None:
            rest.append(subject)
        else:
            of.setdefault(id(found), []).extend(subject.evaluations)
    joined = [dataclasses.replace(one, evaluations=(*one.evaluations, *of.get(id(one), ()))) for one in rest]
    return _with_short_files(joined)


def _place(model: str) -> Path | None:
    """Returns the path of a model that an evaluation names; None: its name can be no path."""
    try:
        return as_path(model).resolve()
    except (OSError, ValueError):
        return None


def _of_model(path: Path, base: Path | None) -> Subject:
    from moe_jax.api.open_source import open_source
    from moe_jax.model_io.adapter_dir import is_adapter_directory
    from moe_jax.model_io.model_dir import ModelDirectory
    from moe_jax.model_io.model_source import OverBase

    stands_on_another = is_adapter_directory(path) or split_step(path) is not None
    source = open_source(path, base=base if stands_on_another else None)
    if split_step(path) is not None:
        kind = "checkpoint of a training run"
    elif isinstance(source, OverBase):
        kind = "adapter directory"
    else:
        kind = "model directory" if isinstance(source, ModelDirectory) else "model as it came"
    return Subject(path=path, kind=kind, model=source)


def _of_run(path: Path, base: Path | None) -> Subject:
    try:
        recipe = read_regular(path / RECIPE, max_bytes=_MAX_RECIPE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path / RECIPE} is not TOML: {error}") from None
    records = read_metrics(path / METRICS)
    wrong = [record for record in records if not isinstance(record, dict) or type(record.get("step")) is not int]
    if wrong:
        raise InputError(f"{path / METRICS}: expected an object with the number of a step, got {shown(wrong[0])}")
    model = _of_model(path / MODEL, base).model if (path / MODEL).is_dir() else None
    run = Run(recipe=recipe, records=records, checkpoints=list(saved_steps(path)))
    return Subject(path=path, kind="training run", model=model, run=run)


def _of_json(path: Path, file: Path) -> Subject:
    if file.suffix != ".json":
        raise InputError(f"{path} is nothing that a report can show; {_EXPECTED}")
    data = read_json(file, allow=ANYTHING)
    if isinstance(data, dict) and data.get("command") == "compress --sweep":
        from moe_jax.compression import Sweep

        measured = data.get("measured")
        if not isinstance(measured, dict):
            raise InputError(f"{file}: measured is {shown(measured)}, expected an object")
        sweep = parse(Sweep, measured, where=str(file), language="JSON")
        if not sweep.points:
            raise InputError(f"{file} is a sweep without a point")
        return Subject(path=path, kind="sweep of compressions", sweep=sweep, sweep_entry=data)
    if isinstance(data, dict) and "layers" in data and "model" in data:
        return Subject(path=path, kind="measurements of experts", measured=_measured(data, file))
    if is_evaluation(data):
        return Subject(path=path, kind="evaluation", evaluations=(parse_evaluation(data, file),))
    raise InputError(f"{path} is nothing that a report can show; {_EXPECTED}")


def _measured(data: dict[str, Any], file: Path) -> Measured:
    """Reads a figures.json, as `figures.write_figures` writes it."""
    problems, layers, shares = [], [], {}
    for number, entry in enumerate(data["layers"] if isinstance(data["layers"], list) else []):
        try:
            if entry.get("load") is not None:
                shares[int(entry["layer"])] = _array(entry["load"], 1)
            if "cosine_to_base" in entry:
                layers.append(_similarity(entry))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            problems.append(f"entry {number} of layers is {shown(entry)}")
    use = None
    if "use" in data:
        try:
            use = _use(data["use"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            problems.append(f"use is {shown(data['use'])}")
    raise_if_any(problems, f"{file} is not what `inspect --plots` writes")
    if not layers and not shares:
        raise InputError(f"{file} holds no layer")
    text = data.get("text")
    name = str(text["path"]) if isinstance(text, dict) and "path" in text else None
    patches = () if use is None else _patches(file.parent)
    return Measured(model=str(data["model"]), layers=layers, shares=shares, text=name, use=use, patches=patches)


def _use(entry: dict[str, Any]) -> ExpertUse:
    by_layer = {_whole(layer["layer"]): layer for layer in entry["layers"]}
    seen, read = (
        {index: _array(layer[name], 1) for index, layer in by_layer.items()} for name in ("of_pictures", "of_text")
    )
    unlike = any(len(seen[index]) != len(read[index]) for index in seen)
    wild = any((counts < 0).any() or (counts > _MOST_COUNTED).any() for counts in (*seen.values(), *read.values()))
    if not seen or len(seen) < len(entry["layers"]) or unlike or wild:
        raise ValueError("no counts of experts")
    tokens = entry["tokens"]
    return ExpertUse(seen, read, [], (_whole(tokens["of_pictures"]), _whole(tokens["of_text"])))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_COUNTED:
        raise ValueError("not a number of tokens")
    return value


def _patches(folder: Path) -> list[bytes]:
    """Returns the files of the first pictures with the experts of their patches, as many as there are in turn."""
    found = []
    for number in range(1, MOST_PICTURES + 1):
        file = folder / PATCHES.format(number)
        if not file.is_file():
            break
        content = read_regular(file, max_bytes=_MAX_PNG_BYTES)
        if not content.startswith(_PNG):
            raise InputError(f"{file} is no PNG")
        found.append(content)
    return found


def _similarity(entry: dict[str, Any]) -> LayerSimilarity:
    cosines = dict(entry["cosine_to_base"])
    whole = _array(cosines.pop("whole_expert"), 1)
    for name in ("mean", "least", "greatest"):
        cosines.pop(name)
    between = _array(entry["cosine_between_experts"], 2)
    to_base = {str(name): _array(values, 1) for name, values in cosines.items()}
    if any(len(values) != len(whole) for values in to_base.values()) or between.shape != (len(whole),) * 2:
        raise ValueError("lengths differ")
    universal = bool(entry["last_expert_is_universal"])
    return LayerSimilarity(int(entry["layer"]), str(entry["base"]), to_base, whole, between, universal)


def _array(values: Any, rank: int) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim != rank or not array.size or not np.isfinite(array).all():
        raise ValueError("not an array of numbers")
    return array


def is_evaluation(data: Any) -> bool:
    """Whether a JSON value looks like one."""
    return isinstance(data, dict) and ("perplexity" in data or "accuracy" in data or "results" in data)


def parse_evaluation(data: Mapping[str, Any], path: Path) -> Evaluation:
    """Reads one of the three kinds.

    Raises:
      InputError: if a figure that there must be is absent or of another kind.
    """
    if "results" in data:
        return _of_tasks(data, path)
    if "perplexity" in data:
        text, tokens = _field(data, "text", "a text", path), _count(data.get("tokens"))
        figures = {name: float(_field(data, name, "a number", path)) for name in ("perplexity", "nll")}
        scores = tuple(Score(text, name, value, count=tokens, is_of_file=True) for name, value in figures.items())
        return Evaluation(path, _field(data, "model", "a text", path), scores)
    low, high = map(float, _field(data, "interval", "two numbers", path))
    file = _field(data, "file", "a text", path)
    accuracy = float(_field(data, "accuracy", "a number", path))
    counted = {"count": _count(data.get("count")), "interval": (low, high), "is_of_file": True}
    score = Score(file, "accuracy", accuracy, **counted)
    labels, confusion = data.get("labels"), data.get("confusion")
    names = tuple(map(str, labels)) if isinstance(labels, list) else ()
    model = _field(data, "model", "a text", path)
    return Evaluation(path, model, (score,), names, _matrix(confusion, len(names)))


def _of_tasks(data: Mapping[str, Any], path: Path) -> Evaluation:
    """lm-eval has `metric,filter` and `metric_stderr,filter` as keys of a task."""
    results, samples = data["results"], data.get("n-samples")
    if not isinstance(results, dict) or not all(isinstance(found, dict) for found in results.values()):
        raise InputError(f"{path}: results is {shown(results)}, expected an object with an object for every task")
    scores = []
    for task, found in results.items():
        counted = samples.get(task) if isinstance(samples, dict) else None
        count = _count(counted.get("effective")) if isinstance(counted, dict) else None
        for key, value in found.items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr") or not is_number(value):
                continue
            error = found.get(f"{metric}_stderr,{how}")
            named = metric if how == "none" else f"{metric} ({how})"
            scores.append(Score(task, named, float(value), float(error) if is_number(error) else None, count))
    config = data.get("config")
    arguments = config.get("model_args") if isinstance(config, dict) else None
    if isinstance(arguments, dict):
        name = arguments.get("path") or arguments.get("pretrained")
    else:
        given = re.search(r"(?:^|,)pretrained=([^,]*)", str(arguments or ""))
        name = given[1] if given else None
    return Evaluation(path, str(name or data.get("model_name") or path), tuple(scores))


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a number": lambda value: is_number(value),
    "two numbers": lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_number, value)),
}


def _field(data: Mapping[str, Any], key: str, expected: str, path: Path) -> Any:
    if not _RIGHT[expected](data.get(key)):
        raise InputError(f"{path}: {key} is {shown(data.get(key))}, expected {expected}")
    return data[key]


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _matrix(rows: Any, size: int) -> tuple[tuple[int, ...], ...]:
    """Counts for every pair of labels; nothing if there are others."""
    whole = isinstance(rows, list) and len(rows) == size
    if not whole or not all(isinstance(row, list) and list(map(_count, row)) == row for row in rows):
        return ()
    return tuple(map(tuple, rows))
