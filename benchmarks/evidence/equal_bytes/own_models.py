"""The models of the comparison: trained as `claims.py` trains them, with the rates that it chose.

They are models of their own, with results of their own: on another kind of machine, whose sums are rounded otherwise,
those of `claims.py` cannot be made again bit for bit.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator

from evidence.equal_bytes.models import Subject
from evidence.results import ResultsFile
from evidence.studies.jobs import MADE, Place
from evidence.studies.plan import DRAWN, studies
from evidence.studies.scales import MIDDLE, STORIES
from evidence.studies.training_job import kept_folder, train_run
from evidence.studies.trainings import Kept, Trainings

DRAWN_STEPS = 3000
"""Of the smallest model from random weights. It has the rates of the larger one, whose experts have learnt so little
that no compression costs anything."""

_SEED = 0


def own_models(subjects: Iterable[Subject], place: Place, claims: ResultsFile) -> list[Kept]:
    """The jobs that make models, and first those that they begin with.

    Args:
      subjects: what is compressed.
      place: of the data. Without SmolLM2, its models are left out.
      claims: the results of `claims.py`, for the rates.
    """
    every = {(model.scale, model.model): model for model in _every(place, claims)}
    drawn = every.get((MIDDLE.name, f"{DRAWN}-s{_SEED}"))
    if drawn is not None:
        run = dataclasses.replace(drawn.arguments["run"], scale=STORIES.name, steps=DRAWN_STEPS)
        every[STORIES.name, drawn.model] = dataclasses.replace(drawn, scale=STORIES.name, arguments={"run": run})
    found: dict[tuple[str, str], Kept] = {}

    def add(scale: str, name: str) -> None:
        if (model := every.get((scale, name))) is not None and (scale, name) not in found:
            for other in model.after:
                add(scale, other)
            found[scale, name] = model

    for subject in subjects:
        add(subject.scale, subject.model)
    return list(found.values())


def adopt(models: Iterable[Kept], results: ResultsFile, place: Place) -> None:
    """Takes models that another program has kept in the same folder, if there are no results of others yet."""
    for model in models:
        file = kept_folder(place, model.scale, model.model) / MADE
        if results.get(*model.path) is None and file.exists():
            results.put(*model.path, value=json.loads(file.read_text()))


def _every(place: Place, claims: ResultsFile) -> Iterator[Kept]:
    """All models of the plan whose rates are chosen, of one seed."""
    for study in studies(place):
        if isinstance(study, Kept):
            yield study
        elif isinstance(study, Trainings):
            # Of models with seeds, that of this one; of a scale's dense model there is one.
            after = tuple(name for key, name in study.after if key[-1] in (str(_SEED), name))
            for shape in study.keep:
                _, rates = study.rates(claims, place, study.shapes[shape])
                if rates is not None:
                    run = study.run(shape, _SEED, rates)
                    yield Kept(study.scale_name, run.keep, train_run, {"run": run}, after=after)
