"""The answer to one prompt, as it comes from the scheduler: text, reasons and log-probabilities."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from moe_jax.data.tokenizer import Tokenizer
from moe_jax.generation.streamed_text import StreamedText
from moe_jax.serve.requests import ProtocolError, Request
from moe_jax.serve.scheduler import Job, News, Scored


class Told(NamedTuple):
    """A token and its log-probabilities; without the latter, the first token of a prompt."""

    token: int
    scored: Scored | None


class Piece(NamedTuple):
    """A part of an answer.

    Attributes:
      text: that was added.
      told: the tokens that were added, also the one that ended the answer, if log-probabilities were asked for.
      finish: `stop` or `length` with the last piece, else None.
    """

    text: str
    told: list[Told]
    finish: str | None


class Answer:
    """The answer to a prompt.

    Attributes:
      job: what the scheduler was asked.
      made: tokens that the answer took so far, the one that ended it included.
    """

    def __init__(self, request: Request, ids: Sequence[int], most: int, stop_ids: Sequence[int], tokenizer: Tokenizer):
        """Makes the job, in a running event loop, and asks nobody yet.

        Args:
          request: what is asked for.
          ids: tokens of the prompt.
          most: tokens to add at most.
          stop_ids: tokens that end the answer.
          tokenizer: of the model.
        """
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._text = StreamedText(tokenizer.decode, request.stop, ids)
        self._request, self._tokenizer = request, tokenizer
        scores = request.logprobs is not None
        loop = asyncio.get_running_loop()
        self.job = Job(
            ids=ids,
            most=most,
            on_news=lambda news: _call(loop, self._news.put_nowait, news),
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop_ids=stop_ids,
            scores=scores,
            scores_prompt=scores and request.echo,
        )
        self.made = 0

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self.job.cancelled = True

    async def pieces(self) -> AsyncIterator[Piece]:
        """The parts of the answer as they come.

        Raises:
          ProtocolError: if the model fails.
        """
        first = True
        try:
            while True:
                news = await self._news.get()
                if news.ended == "error":
                    raise ProtocolError(500, news.problem)
                text, told = "", []
                if first and self._request.echo:
                    text, told = self._tokenizer.decode(self.job.ids), self._prompt_told(news)
                first, finish = False, news.ended
                for at, token in enumerate(news.tokens):
                    self.made += 1
                    told += [Told(token, news.scores[at])] if news.scores else []
                    if news.ended == "stop" and at + 1 == len(news.tokens):
                        break  # it is no text, but clients count on its log-probability
                    text += self._text.push(token)
                    if self._text.stopped_by is not None:
                        finish = "stop"
                        break
                if finish is not None and self._text.stopped_by is None:
                    text += self._text.finish()
                    finish = "stop" if self._text.stopped_by is not None else finish
                if text or told or finish:
                    yield Piece(text, told, finish)
                if finish is not None:
                    return
        finally:
            self.cancel()

    def _prompt_told(self, news: News) -> list[Told]:
        if news.prompt_scores is None:
            return []
        return [Told(token, score) for token, score in zip(self.job.ids, [None, *news.prompt_scores], strict=True)]


def _call(loop: asyncio.AbstractEventLoop, function: Any, news: News) -> None:
    try:
        loop.call_soon_threadsafe(function, news)
    except RuntimeError:
        assert loop.is_closed(), "only a loop that has ended takes no calls"


class TokenTexts:
    """The text of single tokens, as log-probabilities are told of."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a").tolist()[-1:]
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """The text after another; of special tokens, how the vocabulary writes them."""
        if token not in self._known:
            decode = self._tokenizer.decode
            text = decode([*self._before, token]).removeprefix(decode(self._before))
            self._known[token] = text or self._tokenizer.token(token)
        return self._known[token]

    def completion_logprobs(self, told: Sequence[Told], count: int, offset: int) -> dict[str, Any]:
        """The form of `/v1/completions`.

        Args:
          told: the tokens.
          count: of the most likely tokens; the token itself is told besides.
          offset: characters before.
        """
        tokens = [self(one.token) for one in told]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if one.scored is None else one.scored.chosen for one in told],
            "top_logprobs": [None if one.scored is None else self._most_likely(one, count) for one in told],
            "text_offset": offsets,
        }

    def chat_logprobs(self, told: Sequence[Told], count: int) -> dict[str, Any]:
        """The form of `/v1/chat/completions`."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = []
        for one in told:
            assert one.scored is not None
            top = [entry(token, value) for token, value in list(one.scored.top.items())[:count]]
            content.append({**entry(one.token, one.scored.chosen), "top_logprobs": top})
        return {"content": content}

    def _most_likely(self, one: Told, count: int) -> dict[str, float]:
        assert one.scored is not None
        found: dict[str, float] = {}
        for token, value in [*list(one.scored.top.items())[:count], (one.token, one.scored.chosen)]:
            text = self(token)  # of tokens that are written alike, the likelier one
            found[text] = max(value, found.get(text, value))
        return found
