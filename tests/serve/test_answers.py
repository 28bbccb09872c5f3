"""Answers without a model: what is told of tokens, and where in the text they begin."""

import asyncio

import pytest

from moe_jax.data.tokenizer import Tokenizer
from moe_jax.serve.answers import Answer, Piece, TokenTexts, Told
from moe_jax.serve.jobs import News, Scored
from moe_jax.serve.openai import read_completion
from moe_jax.serve.prompts import PromptReader
from tests.support.byte_tokenizer import EOS, byte_tokenizer
from tests.support.dense_models import dense_config

CONFIG = dense_config(vocab_size=300)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes") / "tokenizer.json", adds_bos=True), CONFIG)


def answered(tokenizer: Tokenizer, news: list[News], prompt: str, **fields) -> list[Piece]:
    """The pieces of an answer that is given such news."""

    async def pieces() -> list[Piece]:
        asked = read_completion({"model": "m", "prompt": prompt, "logprobs": 1, **fields})
        given = PromptReader(tokenizer, vocab_size=258, context=300).of(prompt, echo=asked.echo)
        answer = Answer(asked, given, 99, [EOS], tokenizer)
        for one in news:
            answer.job.on_news(one)
        return [piece async for piece in answer.pieces()]

    return asyncio.run(pieces())


def scored(ids: list[int]) -> list[Scored]:
    return [Scored(-1.0, {token: -1.0}) for token in ids]


def test_tokens_begin_where_their_characters_do_also_in_a_stream(tokenizer):
    """One character is four tokens, in two pieces; two bytes are no character, but the text has one for them."""
    prompt, added = "é<s>🔥\n", [*"中".encode(), 0xF0, 0x9F, *b"x", *"é".encode(), EOS]
    news = [News(added[:2], scored(added[:2]), scored([0] * 8)), News(added[2:], scored(added[2:]), ended="stop")]
    pieces = answered(tokenizer, news, prompt, echo=True)
    text = "".join(piece.text for piece in pieces)
    assert text == prompt + "中\ufffdxé"
    begins = [one.begin for piece in pieces for one in piece.told]
    assert begins == [0, 0, 0, 1, 4, 4, 4, 4, 5, 6, 6, 6, 7, 7, 8, 9, 9, 10]
    assert [one.begin for piece in answered(tokenizer, news, prompt) for one in piece.told] == [
        at - 6 for at in begins[9:]
    ]


def test_the_bytes_of_an_answer_make_its_text(tokenizer):
    ids = [*"Y🔥".encode(), EOS]
    told = [one for piece in answered(tokenizer, [News(ids, scored(ids), ended="stop")], "a") for one in piece.told]
    content = TokenTexts(tokenizer).chat_logprobs(told, 1)["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "Y🔥"
    assert [one["token"] for one in content] == ["Y", *(f"bytes:\\x{byte:02x}" for byte in "🔥".encode()), "</s>"]
    assert content[1]["top_logprobs"][0]["bytes"] == [0xF0]


def test_as_many_tokens_are_told_as_were_asked_for(tokenizer):
    """Ids that the tokenizer does not know are written as numbers, as tokens may be; what was taken has its text."""
    top = {0xE4: -0.5, 0xC3: -0.6, ord("A"): -0.7, 290: -0.8}
    texts = TokenTexts(tokenizer)
    texts._known[290] = "A"
    (found,) = texts.completion_logprobs([Told(290, Scored(-0.8, top), 0)], 4)["top_logprobs"]
    assert found == {"bytes:\\xe4": -0.5, "bytes:\\xc3": -0.6, "token_id:65": -0.7, "A": -0.8}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert len(texts.completion_logprobs([Told(66, Scored(-5.0, top), 0)], 3)["top_logprobs"][0]) == 4


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_has_a_piece_for_every_token_also_of_those_that_came_together(tokenizer, stream):
    """Bytes of half a character wait; what ended the answer comes with the last piece."""
    first, last = [*b"Y", *"é".encode(), *b"es"], [*b"no", EOS]
    news = [News(first, []), News(last, [], ended="stop")]
    pieces = answered(tokenizer, news, "a", stream=stream, logprobs=None)
    expected = ["Y", "é", "e", "s", "n", "o", ""] if stream else ["Yées", "no"]
    assert [piece.text for piece in pieces] == expected
    assert [piece.finish for piece in pieces] == [None] * (len(expected) - 1) + ["stop"]
