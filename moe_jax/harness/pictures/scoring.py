"""The sets by name, as task files call them, and what lm-eval is given of one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_jax.harness.pictures.other_sets import Medical, MMBench, MMVet, ScienceQAImages
from moe_jax.harness.pictures.question_set import Answered, QuestionSet
from moe_jax.harness.pictures.short_answers import GQA, POPE, TextVQA, VizWiz, VQAv2

SETS: Mapping[str, QuestionSet] = {
    "vqav2": VQAv2(), "vizwiz": VizWiz(), "textvqa": TextVQA(), "gqa": GQA(), "pope": POPE(),
    "scienceqa_img": ScienceQAImages(), "mmbench": MMBench(), "mmvet": MMVet(), "medical": Medical(),
}  # fmt: skip
"""What `dataset_kwargs.scoring` of a task file may name."""


class _Named:
    """A function that is shown by a name in lm-eval's results, which otherwise hold its source."""

    def __init__(self, name: str, function: Callable[..., Any]):
        self._name, self._function = name, function

    def __call__(self, *given: Any) -> Any:
        return self._function(*given)

    def __str__(self) -> str:
        return self._name

    def __deepcopy__(self, memo: Any) -> "_Named":
        return self


def scoring_keys(name: str) -> dict[str, Any]:
    """Returns the keys of lm-eval's config of a task that score its answers as a set's are scored."""
    which = SETS[name]

    def process(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
        is_judged = which.judged_by is not None and document.get(which.judged_by) is not None
        return which.score(document, results[0].strip()) if is_judged else {}

    metrics = [
        {
            "metric": figure,
            "aggregation": how if isinstance(how, str) else _Named(figure, how),
            "higher_is_better": not figure.startswith("yes_"),
        }
        for figure, how in which.figures.items()
    ]
    return {"process_results": _Named(name, process), "metric_list": metrics}


def scoring_of(task: Any) -> QuestionSet | None:
    """Returns the set as which a task of lm-eval is scored; None: it has metrics of its own."""
    name = (task.get_config("dataset_kwargs") or {}).get("scoring")
    return None if name is None else SETS[name]


def is_judged(task: Any) -> bool:
    """Whether documents of a task that is scored as a set have answers to be compared with."""
    which = scoring_of(task)
    return which is None or (which.judged_by is not None and task.eval_docs[0].get(which.judged_by) is not None)


def upload_of(task: Any, samples: Sequence[Mapping[str, Any]]) -> str:
    """Returns the file for a set's own programs, of the samples in lm-eval's results."""
    which = scoring_of(task)
    assert which is not None
    return which.upload([Answered(one["doc"], one["resps"][0][0].strip()) for one in samples])
