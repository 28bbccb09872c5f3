"""Prompts of requests, without a model."""

import re

import pytest
import tokenizers

from moe_jax.data.tokenizer import Tokenizer
from moe_jax.serve.prompts import PromptReader
from moe_jax.serve.protocol_error import ProtocolError
from tests.support.byte_tokenizer import BOS, byte_tokenizer
from tests.support.dense_models import dense_config

CONFIG = dense_config(vocab_size=300)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes") / "tokenizer.json", adds_bos=True), CONFIG)


def reader_of(tokenizer: Tokenizer) -> PromptReader:
    return PromptReader(tokenizer, vocab_size=300, context=10)


def test_a_prompt_is_echoed_as_it_was_given(tokenizer, tmp_path):
    reader = reader_of(tokenizer)
    assert reader.of("<s>A", echo=True)[:3] == ([BOS, BOS, 65], "<s>A", [0, 0, 3])
    assert reader.of([BOS, 65], echo=True)[:3] == ([BOS, 65], "<s>A", [0, 3])
    assert reader.of("A", echo=False).ids == [BOS, 65]
    # A tokenizer that composes characters, and counts no space to a token that begins with one.
    library = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    library.normalizer = tokenizers.normalizers.NFC()
    library.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    library.save(str(tmp_path / "tokenizer.json"))
    found = reader_of(Tokenizer(tmp_path / "tokenizer.json", CONFIG)).of("e\u0301 A", echo=True)
    assert found[:3] == ([*"é A".encode()], "e\u0301 A", [0, 0, 2, 3])


def test_a_prompt_without_tokens_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("")
    reader = reader_of(Tokenizer(byte_tokenizer(tmp_path / "tokenizer.json"), CONFIG))
    for ask in (lambda: reader.of(""), lambda: reader.of_conversation([{"role": "user", "content": "a"}])):
        with pytest.raises(ProtocolError, match="no tokens"):
            ask()


def test_a_text_that_has_too_many_tokens_however_it_is_cut_is_not_tokenised(tokenizer, monkeypatch):
    """The longest token, `</s>`, has four characters, and the context ten tokens."""
    reader = reader_of(tokenizer)
    assert len(reader.of("a" * 40).ids) == 41  # which the context has no room for, but the scheduler sees that
    monkeypatch.setattr(Tokenizer, "placed", None)
    with pytest.raises(ProtocolError, match="the prompt has 41 characters") as told:
        reader.of("a" * 41)
    assert told.value.status == 400 and told.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("ask", "param", "message"),
    [
        (lambda reader: reader.of("\ud83d"), "prompt", "half of a character"),
        (lambda reader: reader.of([1, -1]), "prompt", "-1 lies outside"),
        (lambda reader: reader.of_conversation([{"role": "user", "content": "a"}]), "messages", "has no chat template"),
    ],
)
def test_messages_are_about_the_prompt_and_name_no_folder_of_the_server(tokenizer, ask, param, message):
    with pytest.raises(ProtocolError, match=message) as told:
        ask(reader_of(tokenizer))
    assert told.value.status == 400 and told.value.param == param
    assert not re.search(r"/|tokenizer\.json is", told.value.message)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request"), (404, "not_found"), (429, "rate_limit"), (499, "invalid_request")]
    + [(500, "server"), (503, "server")],
)
def test_the_kind_of_an_error_follows_its_status(status, kind):
    body = ProtocolError(status, "no", param="prompt", code="because").body()
    assert body == {"error": {"message": "no", "type": f"{kind}_error", "param": "prompt", "code": "because"}}
