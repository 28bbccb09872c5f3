"""A model's answers to the tasks of a benchmark, in the form that another program reads to judge them, as EvalPlus.

A task file says under `metadata.samples` what a line has: keys, and templates of their values, which know the keys of
the example and `completion`, the text that the model wrote. Nothing that a model wrote is executed here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moe_jax.core.errors import InputError, first_sentence, shown
from moe_jax.core.template_sandbox import Template

ONLY_WRITTEN = "bypass"
"""lm-eval's name for the metric of tasks that are not judged."""


def samples_of(results: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields a line for every example of the tasks that describe their samples.

    Args:
      results: from `evaluate_tasks`.

    Raises:
      InputError: if a template fails.
    """
    for name, config in results["configs"].items():
        templates = (config.get("metadata") or {}).get("samples")
        if templates is None:
            continue
        if not isinstance(templates, dict) or not all(isinstance(one, str) for one in templates.values()):
            raise InputError(f"{name}: metadata.samples {shown(templates)}: expected a template for every key")
        for sample in results["samples"][name]:
            text = sample["resps"][0][0]
            try:
                yield {
                    str(key): Template(template, of_task=True).render({**sample["doc"], "completion": text}).text
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
