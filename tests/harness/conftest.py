"""A tiny Llama over bytes, as Transformers saves it, and task files over a few lines of data."""

import json

import pytest

from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer  # noqa: E402
from tests.support.task_files import QUESTIONS, TASKS, write_task


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
    import torch
    import transformers

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
