"""A tiny Llama over bytes, as Transformers saves it, and task files over a few lines of data."""

import json
import os

import pytest

# What lm-eval shows of its progress would stand between the lines of a command.
os.environ["TQDM_DISABLE"] = "1"
pytest.importorskip("lm_eval")

from tests.training.conftest import BOS, EOS, byte_tokenizer  # noqa: E402

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


@pytest.fixture
def folder(tmp_path):
    """Task files with their data beside them."""
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for config in TASKS:
        write_task(tmp_path, config)
    return tmp_path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A Hugging Face directory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.4,
    )
    path = tmp_path_factory.mktemp("harness") / "tiny"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer(path / "tokenizer.json")
    return path
