"""Answers of the OpenAI protocol as they come from the scheduler: texts, and the log-probabilities of their tokens.

An answer's tokens do not depend on the requests that are answered beside it, unless two tokens are as good as equally
likely. Log-probabilities may differ by about 3e-6: with other numbers of rows, sums are made in another order.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from moe_jax.data.tokenizer import Tokenizer
from moe_jax.generation.texts import StreamedText
from moe_jax.serve.jobs import Job, News, Scored
from moe_jax.serve.openai import Request
from moe_jax.serve.prompts import Begins, Prompt
from moe_jax.serve.protocol_error import ProtocolError


class Told(NamedTuple):
    """A token, its log-probabilities, None of the first token of a prompt, and where in the text it begins."""

    token: int
    scored: Scored | None
    begin: int


class Piece(NamedTuple):
    """A part of an answer: text that was added, and its tokens if log-probabilities were asked for.

    The token that ended the answer is told too; `finish` is `stop` or `length` with the last piece, else None.
    """

    text: str
    told: list[Told]
    finish: str | None


class Answer:
    """The answer to a prompt: makes its `job` for the scheduler, in a running event loop, and asks nobody yet.

    `made` counts the tokens that the answer took so far, the one that ended it included.
    """

    def __init__(self, request: Request, prompt: Prompt, most: int, stop_ids: Sequence[int], tokenizer: Tokenizer):
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._text = StreamedText(tokenizer.decode, request.stop, prompt.ids)
        self._request, self._prompt = request, prompt
        self._begins = Begins(tokenizer, prompt.ids, len(prompt.text))
        scores = request.logprobs is not None
        loop = asyncio.get_running_loop()
        self.job = Job(
            ids=prompt.ids,
            most=most,
            on_news=lambda news: _call(loop, self._news.put_nowait, news),
            temperature=request.temperature,
            top_p=request.top_p,
            seed=secrets.randbits(32) if request.seed is None else request.seed,
            stop_ids=stop_ids,
            scores=scores,
            scores_prompt=scores and request.echo,
            streams=request.stream,
            pictures=prompt.pictures,
            slots=prompt.slots,
        )
        self.made = 0

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self.job.cancelled = True

    async def _told(self) -> AsyncIterator[News]:
        """The news as they come; in a stream of one token each, as clients expect, also where several came together."""
        while True:
            news = await self._news.get()
            for one in news.one_by_one() if self._request.stream else [news]:
                yield one

    async def pieces(self) -> AsyncIterator[Piece]:
        """The parts of the answer as they come, in a stream token by token; `ProtocolError` if the model fails."""
        first = True
        try:
            async for news in self._told():
                if news.ended == "error":
                    raise ProtocolError(500, news.problem)
                text, told = "", list[Told]()
                if first and self._request.echo:
                    text = self._prompt.text
                    if news.prompt_scores is not None:
                        told = list(map(Told, self._prompt.ids, [None, *news.prompt_scores], self._prompt.begins))
                first, finish = False, news.ended
                for at, token in enumerate(news.tokens):
                    self.made += 1
                    told += [Told(token, news.scores[at], self._begins.of(token))] if news.scores else []
                    if news.ended == "stop" and at + 1 == len(news.tokens):
                        break  # it is no text, but clients count on its log-probability
                    text += self._text.push(token)
                    if self._text.ended_by is not None:
                        finish = "stop"
                        break
                if finish is not None and self._text.ended_by is None:
                    text += self._text.finish()
                    finish = "stop" if self._text.ended_by is not None else finish
                if text or told or finish:
                    yield Piece(text, told, finish)
                if finish is not None:
                    return
        finally:
            self.cancel()


def _call(loop: asyncio.AbstractEventLoop, function: Any, news: News) -> None:
    try:
        loop.call_soon_threadsafe(function, news)
    except RuntimeError:
        assert loop.is_closed(), "only a loop that has ended takes no calls"


class TokenTexts:
    """How single tokens are written where log-probabilities are told."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """The text after another; of special tokens, how the vocabulary writes them; of half a character, its bytes."""
        if token not in self._known:
            content = self._tokenizer.bytes_of(token)
            self._known[token] = _written(content) if content else self._tokenizer.token(token)
        return self._known[token]

    def completion_logprobs(self, told: Sequence[Told], count: int) -> dict[str, Any]:
        """The form of `/v1/completions`, with `count` of the most likely tokens."""
        return {
            "tokens": [self(one.token) for one in told],
            "token_logprobs": [None if one.scored is None else one.scored.chosen for one in told],
            "top_logprobs": [None if one.scored is None else self._most_likely(one, count) for one in told],
            "text_offset": [one.begin for one in told],
        }

    def chat_logprobs(self, told: Sequence[Told], count: int) -> dict[str, Any]:
        """The form of `/v1/chat/completions`. The bytes of all tokens, joined, are the text's."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self(token), "logprob": logprob, "bytes": list(self._tokenizer.bytes_of(token))}

        content = []
        for one in told:
            assert one.scored is not None
            top = [entry(token, value) for token, value in list(one.scored.top.items())[:count]]
            content.append({**entry(one.token, one.scored.chosen), "top_logprobs": top})
        return {"content": content}

    def _most_likely(self, one: Told, count: int) -> dict[str, float]:
        """By how tokens are written; of two that are written alike, the less likely one has its id instead."""
        assert one.scored is not None
        found = {self(one.token): one.scored.chosen}
        for token, value in list(one.scored.top.items())[:count]:
            if token != one.token:
                text = self(token)
                found[text if text not in found else f"token_id:{token}"] = value
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _written(content: bytes) -> str:
    """Bytes as a text, or, where they are none, as OpenAI writes them: `bytes:\\xf0\\x9f`."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in content)
