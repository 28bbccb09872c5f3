"""Task files of lm-eval over a few questions."""

import json
import os

# What lm-eval shows of its progress would stand between the lines of a command.
os.environ["TQDM_DISABLE"] = "1"


QUESTIONS = [
    {"q": "what is it?", "a": ["a cat", "the dog of a man", "x"], "gold": 1},
    {"q": "where?", "a": ["at home", "there", "not here at all"], "gold": 0},
    {"q": "why is it that the sky is so blue today?", "a": ["light", "sea", "it is"], "gold": 2},
    {"q": "who?", "a": ["a", "b", "c"], "gold": 2},
]


METRIC = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}


CHOICE = {
    "task": "choice",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{ q }}\nA:",
    "doc_to_choice": "{{ a }}",
    "doc_to_target": "gold",
    "metric_list": [METRIC],
}


SAID = {**CHOICE, "task": "said", "output_type": "loglikelihood", "doc_to_target": "{{ ' ' ~ a[gold] }}"}


del SAID["doc_to_choice"]


ROLLING = {
    **SAID,
    "task": "rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{ q }}",
}


ROLLING["metric_list"] = [{"metric": "bits_per_byte"}]


WRITTEN = {
    **SAID,
    "task": "written",
    "output_type": "generate_until",
    "doc_to_target": "{{ a[gold] }}",
    "generation_kwargs": {"until": ["\n\n", "q"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


TASKS = (CHOICE, SAID, ROLLING, WRITTEN)


def write_task(folder, config, name=None):
    """A task file in JSON, which is YAML too."""
    file = folder / f"{name or config['task']}.yaml"
    file.write_text(json.dumps(config))
    return file
