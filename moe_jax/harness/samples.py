"""Files of the texts that a model wrote, in the forms in which other programs judge them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moe_jax.core.errors import InputError, first_sentence, shown
from moe_jax.core.template_sandbox import Template
from moe_jax.harness.pictures.scoring import is_judged, scoring_of, upload_of

ONLY_WRITTEN = "bypass"
"""lm-eval's name for the metric of tasks that are not judged."""


class Samples(NamedTuple):
    """Attributes:
    content: of the file.
    count: number of answers in it.
    """

    content: str
    count: int


def check_samples(tasks: Mapping[str, Any], *, asked_for: bool) -> None:
    """Raises `InputError` where a file of samples is needed and not asked for, or asked for and there would be none.

    Args:
      tasks: of lm-eval, by name.
      asked_for: whether there is a place for the file.
    """
    described = [name for name, task in tasks.items() if (task.get_config("metadata") or {}).get("samples")]
    sets = [name for name, task in tasks.items() if scoring_of(task) is not None]
    unjudged = [*described, *(name for name in sets if not is_judged(tasks[name]))]
    if not asked_for and unjudged:
        raise InputError(f"{unjudged[0]} is not judged here, but written for another program: give --samples FILE")
    if asked_for and not described and not sets:
        raise InputError("--samples: none of the tasks says what its samples are (metadata.samples)")
    if asked_for and len(sets) > 1 - bool(described):
        raise InputError(
            f"--samples: a file has the answers to one set, and these are {', '.join([*sets, *described])}"
        )


def samples_file(tasks: Mapping[str, Any], results: Mapping[str, Any]) -> Samples:
    """Returns the file of the samples in what `evaluate_tasks` returned, after `check_samples`."""
    for name, task in tasks.items():
        if scoring_of(task) is not None:
            found = results["samples"][name]
            return Samples(upload_of(task, found), len(found))
    lines = [json.dumps(line, ensure_ascii=False) for line in samples_of(results)]
    return Samples("".join(f"{line}\n" for line in lines), len(lines))


def samples_of(results: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields a line for every answer to tasks that describe their samples, of what `evaluate_tasks` returned.

    An example has as many answers as the task asks for (`repeats`).
    """
    for name, config in results["configs"].items():
        templates = (config.get("metadata") or {}).get("samples")
        if templates is None:
            continue
        if not isinstance(templates, dict) or not all(isinstance(one, str) for one in templates.values()):
            raise InputError(f"{name}: metadata.samples {shown(templates)}: expected a template for every key")
        answers = ((sample["doc"], text) for sample in results["samples"][name] for text in sample["resps"][0])
        for doc, text in answers:
            try:
                yield {
                    str(key): Template(template, of_task=True).render({**doc, "completion": text}).text
                    for key, template in templates.items()
                }
            except Exception as error:  # a template can do anything that raises
                raise InputError(f"{name}: metadata.samples fails: {first_sentence(error)}") from None


def without_unjudged(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results without the figure that lm-eval gives tasks that nobody judged."""
    kept = {
        name: {
            key: value for key, value in figures.items() if key.split(",")[0].removesuffix("_stderr") != ONLY_WRITTEN
        }
        for name, figures in results["results"].items()
    }
    return {**results, "results": kept}
