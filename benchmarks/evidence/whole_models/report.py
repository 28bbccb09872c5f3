"""The comparison as tables in Markdown."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evidence.studies.probes import TASKS
from evidence.studies.verdicts import Effect, effect
from evidence.tables import markdown
from evidence.whole_models.entries import ENTRIES, OURS, PEERS, TRIES, WHOLE, Entry, size_of
from evidence.whole_models.picture import draw
from evidence.whole_models.scores import NEW_TOKENS
from evidence.whole_models.small_models import TEXTS
from evidence.whole_models.study import MODELS, NAME, REFUSED, TRAINING, WholeModelsFile

WINS, LOSES, UNDECIDED = "wins", "loses", "cannot decide"
_HEAD = ("", "MB", "bits per weight")
_AGAINST = (
    *("against", "bits per weight", "ours", "bits per weight", "its loss less theirs, nats [95 %]", "by draw"),
    *("KL, ours", "KL, theirs", "its KL less theirs, nats [95 %]", "by draw", "ours, by loss", "by KL"),
)
_STEPS = ("with the step", "bits per weight", "without it", "bits per weight", "loss, with less without, nats [95 %]",
          "by draw", "KL, with less without, nats [95 %]", "by draw")  # fmt: skip
_ANSWERS = ("", "bits per weight", *(f"{task}, % right of {{0:,}} [95 %]" for task in TASKS),
            "both, less the whole model, % [95 %]")  # fmt: skip


class Point(NamedTuple):
    """An entry on one model.

    Attributes:
      entry: what was done.
      runs: its results by draw; the first has windows and prompts.
    """

    entry: Entry
    runs: Mapping[str, dict[str, Any]]

    @property
    def first(self) -> dict[str, Any]:
        return self.runs["0"]

    @property
    def bits(self) -> float:
        return self.first["bits_per_weight"]

    @property
    def kl(self) -> float:
        """Mean of the texts and draws."""
        return statistics.fmean(self.by_draw("kl").values())

    def by_draw(self, key: str) -> dict[str, float]:
        """`losses` or `kl`, mean of the texts."""
        return {draw: mean_of(run[key]) for draw, run in self.runs.items()}


def mean_of(by_text: Mapping[str, float]) -> float:
    """All texts count alike."""
    return statistics.fmean(by_text.values())


def points(results: WholeModelsFile, model: str) -> Iterator[Point]:
    """All entries that a model has, but those that were refused."""
    for entry in ENTRIES:
        runs = results.get(MODELS, model, entry.label) or {}
        if "0" in runs and REFUSED not in runs["0"]:
            yield Point(entry, {draw: _of_first_training(run, results, model) for draw, run in runs.items()})


def _of_first_training(run: dict[str, Any], results: WholeModelsFile, model: str) -> dict[str, Any]:
    """Moves the losses of a run by what the whole model of the first training loses more than that of its own.

    So what is added to the loss stays that over its own whole model, and entries of several trainings can stand beside
    each other. Divergences and tokens alike are those from its own whole model anyway.
    """
    first, own = (results.get(MODELS, model, WHOLE, str(number)) for number in (0, run.get(TRAINING, 0)))
    if own is first:
        return run
    losses = {text: loss - own["losses"][text] + first["losses"][text] for text, loss in run["losses"].items()}
    moved: dict[str, Any] = {"losses": losses}
    if "window_losses" in run:
        moved["window_losses"] = {
            text: [
                loss - before + at_first
                for loss, before, at_first in zip(
                    windows, own["window_losses"][text], first["window_losses"][text], strict=True
                )
            ]
            for text, windows in run["window_losses"].items()
        }
    return run | moved


def write_report(results: WholeModelsFile, out: Path) -> str:
    """Writes `whole_models.md` and `whole_models.png`; returns the Markdown."""
    text = report(results)
    (out / f"{NAME}.md").write_text(text)
    by_model = {
        model: [point for point in points(results, model) if not point.entry.only_step]
        for model in results.get(MODELS) or {}
    }
    draw({model: (found, mean_of(_whole(results, model)["losses"])) for model, found in by_model.items() if found},
         out / f"{NAME}.png")  # fmt: skip
    return text


def report(results: WholeModelsFile) -> str:
    """Everything that was measured."""
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in tables(results).items())
    return f"# Whole models\n\n{text}\n"


def tables(results: WholeModelsFile) -> dict[str, str]:
    """Of every model: ours against each peer at its bytes, what every step is worth, answers to questions, all entries
    by bytes; and what could not be made."""
    found = {"models": _models(results)}
    for model in results.get(MODELS) or {}:
        every = list(points(results, model))
        if rows := list(_against(every)):
            found[f"{model}, against"] = markdown(_AGAINST, rows)
        if rows := list(_by_step(every)):
            found[f"{model}, every step"] = markdown(_STEPS, rows)
        if rows := list(_answered(every, _whole(results, model))):
            head = (title.format(len(next(iter(_whole(results, model)["answers"].values())))) for title in _ANSWERS)
            found[f"{model}, questions"] = markdown(tuple(head), rows)
        found[model] = _entries(every, _whole(results, model))
    refused = [
        [model, label, runs["0"][REFUSED]]
        for model, by_label in (results.get(MODELS) or {}).items()
        for label, runs in by_label.items()
        if REFUSED in runs["0"]
    ]
    return found | ({"refused": markdown(("model", "entry", "why"), refused)} if refused else {})


def _whole(results: WholeModelsFile, model: str) -> dict[str, Any]:
    return results.get(MODELS, model, WHOLE, "0")


def _models(results: WholeModelsFile) -> str:
    rows = []
    for model in results.get(MODELS) or {}:
        whole = _whole(results, model)
        sizes = whole["sizes"]
        losses = (f"{whole['losses'][text]:.4f}" for text in TEXTS)
        experts = str(whole["experts"] or "dense")
        scored = f"{sizes['windows']} × {sizes['length']}"
        calibrated = f"{sizes['samples']} × {sizes['seq_len']}"
        rows.append([model, f"{whole['weights']:,}", experts, scored, calibrated, str(sizes["prompts"]), *losses])
    head = ("model", "parameters", "experts", "tokens scored, of every text", "to calibrate with", "prompts")
    return markdown((*head, *(f"{text}, nats per token" for text in TEXTS)), rows)


def _entries(every: Sequence[Point], whole: dict[str, Any]) -> str:
    rows = [
        [
            *(f"{point.entry.whose}: {point.entry.label}", f"{point.first['bytes'] / 1e6:.2f}", f"{point.bits:.3f}"),
            *(str(effect(added(point.first, whole, (text,)))) for text in TEXTS),
            str(effect(added(point.first, whole))),
            _spread(point),
            f"{point.kl:.4f}",
            _greedy(point.first),
        ]
        for point in sorted(every, key=lambda point: point.bits)
    ]
    texts = (f"{text}, added to {whole['losses'][text]:.4f} nats [95 %]" for text in TEXTS)
    more = (f"all, added to {mean_of(whole['losses']):.4f} nats [95 %]", "mean ± deviation of draws", "KL, nats")
    return markdown((*_HEAD, *texts, *more, f"greedy tokens alike until the first other one of {NEW_TOKENS}, % [95 %]"),
                    rows)  # fmt: skip


def added(
    run: dict[str, Any], other: dict[str, Any], texts: Sequence[str] = TEXTS, *, key: str = "window_losses"
) -> list[float]:
    """What a run loses more than another, or what else lies at a key, window by window."""
    return [one - before for text in texts for one, before in zip(run[key][text], other[key][text], strict=True)]


def _spread(point: Point) -> str:
    losses = list(point.by_draw("losses").values())
    if len(losses) == 1:
        return f"{losses[0]:.4f}"
    return f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses):.4f}"


def _greedy(run: dict[str, Any]) -> str:
    return _percent([100 * same / NEW_TOKENS for same in run["same_until"]])


def _against(every: Sequence[Point]) -> Iterator[list[str]]:
    """Ours beside every peer: what was allocated within its bytes, and the same with plans that were tried.

    Where nothing was allocated within just these bytes, the largest that was allocated within fewer.
    """
    by_label = {point.entry.label: point for point in every}
    for peer in PEERS:
        theirs = by_label.get(peer.label)
        for tried in ("", f", {TRIES} tries"):
            name = f"allocate{tried}, bytes of "
            ours = by_label.get(f"{name}{size_of(peer)}") or _largest_below(theirs, name, every)
            if theirs is None or ours is None:
                continue
            assert ours.entry.whose == OURS
            found = effect(added(ours.first, theirs.first))
            assert found is not None
            yield [
                f"{peer.whose}: {peer.label}",
                *(
                    f"{theirs.bits:.3f}",
                    f"allocate{tried}",
                    f"{ours.bits:.3f}",
                    str(found),
                    more_by_draw(ours, theirs, "losses"),
                ),
                *(f"{ours.kl:.4f}", f"{theirs.kl:.4f}"),
                *(str(diverges := more_divergence(ours, theirs)), more_by_draw(ours, theirs, "kl")),
                *(verdict(found), verdict(diverges)),
            ]


def _largest_below(theirs: Point | None, name: str, every: Sequence[Point]) -> Point | None:
    """The largest entry whose label begins with a name and that has no more bytes than another."""
    if theirs is None:
        return None
    some = [point for point in every if point.entry.label.startswith(name) and point.bits <= theirs.bits]
    return max(some, key=lambda point: point.bits, default=None)


def more_by_draw(one: Point, other: Point, key: str) -> str:
    """What one has more than another, draw by draw; nothing if there is but one."""
    these, those = one.by_draw(key), other.by_draw(key)
    more = [value - those[beside] for draw, value in these.items() if (beside := _draw_beside(one, draw, other))]
    return ", ".join(f"{value:+.4f}" for value in more) if len(more) > 1 else ""


def _draw_beside(one: Point, draw: str, other: Point) -> str | None:
    """The draw of another entry that stands beside a draw: of the same training, and of the same text to calibrate
    with, if both are calibrated; None if there is none. First draws are of trainings that lose alike (`study.ALIKE`).
    """
    if draw == "0":
        return draw
    training = one.runs[draw].get(TRAINING, 0)
    same = [number for number, run in other.runs.items() if run.get(TRAINING, 0) == training]
    return next((number for number in same if number == draw or not other.entry.calibrated), None)


def more_divergence(one: Point, other: Point) -> Effect:
    """The divergence of one less that of another, window by window."""
    found = effect(added(one.first, other.first, key="window_kl"))
    assert found is not None
    return found


def _by_step(every: Sequence[Point]) -> Iterator[list[str]]:
    """What has one step more beside what lacks it."""
    by_label = {point.entry.label: point for point in every}
    for point in every:
        if without := by_label.get(point.entry.without or ""):
            loss = effect(added(point.first, without.first))
            yield [
                *(point.entry.label, f"{point.bits:.3f}", without.entry.label, f"{without.bits:.3f}"),
                *(str(loss), more_by_draw(point, without, "losses")),
                *(str(more_divergence(point, without)), more_by_draw(point, without, "kl")),
            ]


def _answered(every: Sequence[Point], whole: dict[str, Any]) -> Iterator[list[str]]:
    """What answered questions, the whole model first."""
    if "answers" not in whole:
        return
    runs = [(WHOLE, whole), *((f"{point.entry.whose}: {point.entry.label}", point.first) for point in every)]
    for label, run in runs:
        if "answers" in run:
            right = {task: _right(run, task) for task in TASKS}
            less = [
                one - before for task in TASKS for one, before in zip(right[task], _right(whole, task), strict=True)
            ]
            yield [
                *(label, f"{run['bits_per_weight']:.3f}"),
                *(_percent(right[task]) for task in TASKS),
                "" if label == WHOLE else _percent(less, sign="+"),
            ]


def _right(run: dict[str, Any], task: str) -> list[float]:
    """Of every question 100 if the answer is right, else 0."""
    return [100.0 * int(right) for right in run["answers"][task]]


def _percent(values: Sequence[float], sign: str = "") -> str:
    """A mean of percentages, and its interval."""
    found = effect(values)
    assert found is not None
    return f"{found.mean:{sign}.1f} [{found.low:{sign}.1f}, {found.high:{sign}.1f}]"


def verdict(found: Effect) -> str:
    """Whether ours is lower, by the interval of the difference."""
    if found.high < 0:
        return WINS
    return LOSES if found.low > 0 else UNDECIDED
