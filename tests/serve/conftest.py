"""A tiny model, served."""

import contextlib
import dataclasses
import json
import threading

import pytest

import moe_jax
from tests.training.conftest import BOS, EOS, byte_tokenizer
from tests.upcycling.conftest import dense_config, random_leaves, write_model

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CONTEXT = 300


@pytest.fixture(scope="session")
def served_dir(tmp_path_factory):
    """A random model over bytes that is told of conversations, with room for more tokens than the first caches have."""
    folder = tmp_path_factory.mktemp("served")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}))
    config = dense_config(num_layers=2, vocab_size=258, bos_id=BOS, eos_ids=(EOS,))
    config = dataclasses.replace(config, max_positions=CONTEXT)
    files = (byte_tokenizer(folder / "tokenizer.json", adds_bos=True), settings)
    return write_model(folder / "tiny", config, random_leaves(config), files)


@pytest.fixture(scope="session")
def model(served_dir):
    return moe_jax.load(served_dir)


@contextlib.contextmanager
def serving(model, engine):
    """The address of a server in a thread."""
    import uvicorn

    from moe_jax.commands.serve import _address, _listening
    from moe_jax.serve.app import make_app

    with _listening("127.0.0.1", 0) as listener:
        app = make_app(model, model.tokenizer, engine, "tiny")
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield _address(listener)
        finally:
            server.should_exit = True
            thread.join(30)
            engine.close()
            assert not thread.is_alive()
