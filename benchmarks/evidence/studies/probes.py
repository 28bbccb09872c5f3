"""What a language model that knows something is asked beside its loss: questions, and texts that it goes on with."""

import dataclasses
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from evidence.studies.corpus import Corpus, tokenizer_file
from evidence.studies.jobs import Place
from evidence.studies.models import Leaves, model_of
from evidence.studies.scales import SCALES
from evidence.studies.texts import DOMAINS
from evidence.studies.training_job import TEST
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.generation.spec import GenerateSpec
from moe_jax.generation.texts import stream
from moe_jax.model_io.loading import load_model
from moe_jax.nn import Decoder

TASKS = {"piqa": "piqa_local", "arc_easy": "arc_easy_local"}
NEW_TOKENS, PROMPT_TOKENS = 64, 64
_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Probes:
    """Attributes:
    questions: of PIQA and of ARC-easy, each, the first.
    prompts: of every domain's test text, which the model goes on with.
    """

    questions: int
    prompts: int


def probed(place: Place, scale: str, leaves: Leaves, whole: Leaves, probes: Probes) -> dict[str, Any]:
    """What a model answers.

    Args:
      place: of the data.
      scale: of the model.
      leaves: of the model.
      whole: of the model that it was made of.
      probes: what is asked.

    Returns:
      answers: of every task, the questions in order: `1` for each that is right, else `0`. accuracy: of every task.
      agreement: of the tokens that the model goes on with greedily, the share that equals the whole model's
        `until_first` difference, and the share that is equal `by_position`.
      same_until, same_positions: of every prompt, the numbers of these tokens.
    """
    found: dict[str, Any] = {}
    if probes.questions:
        tokenizer = Tokenizer(tokenizer_file(place, SCALES[scale]), leaves.config)
        found["answers"] = answers(place, model_of(leaves), tokenizer, probes.questions)
        found["accuracy"] = {task: right.count("1") / len(right) for task, right in found["answers"].items()}
    if probes.prompts:
        prompts = _prompts(place, scale, leaves, probes.prompts)
        found |= agreement(continued(leaves, prompts), _of_whole(whole, prompts))
    return found


def answers(place: Place, model: Decoder, tokenizer: Tokenizer, questions: int) -> dict[str, str]:
    """Which of the first questions of every task are answered right, by the likelihood of the choices."""
    # Its bars of progress would hide what the runner says.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Only here, because lm-eval takes seconds to import.
    from moe_jax.harness.language_model import HarnessModel
    from moe_jax.harness.task_files import sandboxed_templates
    from moe_jax.harness.task_run import evaluate_tasks, known_tasks, load_tasks

    harness = HarnessModel(model, tokenizer, batch_size=_ROWS)
    with sandboxed_templates():
        tasks = load_tasks(list(TASKS.values()), known_tasks(data=place.data / "eval"))
        samples = evaluate_tasks(harness, tasks, limit=questions, num_fewshot=0)["samples"]
    found = {}
    for name, task in TASKS.items():
        right = {sample["doc_id"]: sample["acc"] for sample in samples[task]}
        found[name] = "".join(str(int(right[index])) for index in sorted(right))
    return found


def continued(leaves: Leaves, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The greedy tokens after every prompt."""
    steps = stream(load_model(leaves, stacked=False), prompts, GenerateSpec(max_new_tokens=NEW_TOKENS))
    return np.stack(list(steps), axis=1).tolist()


def agreement(these: Sequence[Sequence[int]], those: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How far two models go on alike; see `probed`."""
    until, positions = [], []
    for one, other in zip(these, those, strict=True):
        same = np.equal(one, other)
        until.append(int(np.argmin(same)) if not same.all() else len(same))
        positions.append(int(same.sum()))
    tokens = sum(map(len, those))
    return {
        "agreement": {"until_first": sum(until) / tokens, "by_position": sum(positions) / tokens},
        "same_until": until,
        "same_positions": positions,
    }


def _prompts(place: Place, scale: str, leaves: Leaves, count: int) -> tuple[tuple[int, ...], ...]:
    """Stretches of every test text, as far from each other as can be."""
    corpus = Corpus(place, SCALES[scale], leaves.config, tokenizer_file(place, SCALES[scale]))
    found = []
    for ids in corpus.scored(TEST, DOMAINS).values():
        starts = np.linspace(0, len(ids) - PROMPT_TOKENS, count).astype(int)
        found += [tuple(ids[start : start + PROMPT_TOKENS].tolist()) for start in starts]
    return tuple(found)


# A worker asks the whole model once.
_of_whole = lru_cache(maxsize=2)(continued)
