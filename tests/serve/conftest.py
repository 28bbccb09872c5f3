"""A tiny model, served."""

import dataclasses
import json

import pytest

import moe_jax
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.served_models import CONTEXT

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def served_dir(tmp_path_factory):
    """A random model over bytes that is told of conversations, with room for more tokens than the first caches have."""
    return write_served(tmp_path_factory.mktemp("served"), CONFIG)


CONFIG = dense_config(num_layers=2, vocab_size=258, bos_id=BOS, eos_ids=(EOS,))


def write_served(folder, config):
    """Writes a random model over bytes, with a chat template and room for `CONTEXT` tokens."""
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}))
    config = dataclasses.replace(config, max_positions=CONTEXT)
    files = (byte_tokenizer(folder / "tokenizer.json", adds_bos=True), settings)
    return write_model(folder / "tiny", config, random_leaves(config), files)


@pytest.fixture(scope="session")
def model(served_dir):
    return moe_jax.load(served_dir)
