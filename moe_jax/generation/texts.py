"""Generation with a KV cache, for batches of prompts of different lengths; and the text of tokens as they come.

Of a model with an encoder, a prompt is what the encoder is given, once; the decoder begins with its own first token.

Lengths are rounded up to buckets, for which programs are compiled, and tokens come in blocks: the first at once, then
ever more together. Neither changes a result.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray

from moe_jax.core.errors import InputError
from moe_jax.generation.continued_rows import ask
from moe_jax.generation.engine import MOST_STEPS, Block, Engine
from moe_jax.generation.pictures import Pictures
from moe_jax.generation.spec import GenerateSpec
from moe_jax.nn import Decoder

FIRST_BLOCK = 8
"""Tokens after the first one that come together; the blocks after them are longer."""


class NonFiniteLogits(InputError):
    """Logits are NaN or infinite: no token can be chosen by them."""


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    wanted: GenerateSpec,
    *,
    key: PRNGKeyArray | None = None,
    eos_ids: Sequence[int] = (),
    ended: Bool[np.ndarray, " B"] | None = None,
    seconds: float | None = None,
    pictures: Pictures | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Yields the next token of every row, step after step, until every row was given one of `eos_ids` or has ended.

    The first comes at once, the others in blocks, which grow. A row that has ended is given -1. A row's tokens do not
    depend on its neighbours.

    The layers of a model that is stacked are copied into arrays of their own first, which takes as much memory again,
    unless they go in a loop (`layer_loop`). Those of a model that is unstacked (`load_model(..., stacked=False)`) are
    not, unless they differ in the forms of their kernels alone: these are copied to be joined (`alike_layers`).

    Args:
      model: the decoder.
      prompts: token ids, at least one per prompt; with an encoder, its inputs.
      wanted: how the prompts are continued; `stop_ids` and `stop` are the caller's.
      key: of sampling; by default that of the seed.
      eos_ids: a row ends with the first of these.
      ended: rows that the caller wants no more of, which it may say while it is given tokens; looked at before a block.
      seconds: that a block should take, so that somebody can read along; None: blocks are as long as they can be.
      pictures: in the prompts, which have placeholders for their features, as `see_prompts` returns both.

    Raises:
      InputError: for an empty prompt, or ids outside the vocabulary.
      NonFiniteLogits: if logits are not finite.
    """
    model.config.check_scores_tokens("generation")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise InputError("generation needs at least one token in every prompt; give a text, or the BOS token")
    for prompt in prompts:
        check_in_vocabulary(prompt, model.config.vocab_size)
    longest, max_new_tokens = max(map(len, prompts)), wanted.max_new_tokens
    engine = Engine(model, draws=wanted.temperature > 0)
    if model.config.has_encoder:
        cache_length = engine.room(max_new_tokens)
    else:
        cache_length = engine.room(engine.room(longest) + max_new_tokens, needed=longest + max_new_tokens)
    asked = ask(
        len(prompts),
        max_new_tokens,
        key=jax.random.key(wanted.seed) if key is None else key,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        stop_ids=eos_ids,
    )
    rows, block, _ = engine.read(prompts, asked, cache_length, pictures=pictures)
    # Who reads along is not kept waiting before anything is known of the pace.
    done, steps = 0, FIRST_BLOCK if seconds is None else 1
    while True:
        yield from _checked(block, done)
        done += len(block.tokens)
        stay = block.active if ended is None else block.active & ~ended
        if not stay.any():
            return
        rows, block = engine.advance(rows, steps, stay=stay)
        steps = MOST_STEPS if seconds is None else engine.steps_in(seconds)


def _checked(block: Block, before: int) -> Iterator[Int[np.ndarray, " B"]]:
    """Yields the tokens of a block, up to the first whose logits are not finite, the last that its row was given."""
    last = (block.tokens >= 0).sum(axis=0) - 1
    bad = min((int(last[row]), int(row)) for row in np.flatnonzero(~block.finite)) if not block.finite.all() else None
    for step, tokens in enumerate(block.tokens):
        if bad is not None and bad[0] == step:
            raise NonFiniteLogits(f"prompt {bad[1] + 1} has logits that are not finite at token {before + step + 1}")
        yield tokens


_BROKEN = "\ufffd"  # how bytes are shown that are no character

Decode = Callable[[Sequence[int]], str]
OnText = Callable[[int, str], object]


class Detokenizer:
    """Text of one row of tokens after another text.

    A token's text depends on what stands before it (some decoders take the first space of a text away) and on what
    comes after it (a character may be several tokens). So tokens are decoded together with those of the piece before,
    and bytes that may be half a character wait for the next token.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()):
        """Begins after the tokens `before`; `decode` gives the text of ids."""
        self._decode = decode
        self._window = list(before)
        self._given = decode(self._window)
        self._before = len(self._window)

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is certain with it."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_BROKEN):
            return ""
        new = self._new(text)
        if new:  # these tokens are the context of what comes
            self._window = self._window[self._before :]
            self._before, self._given = len(self._window), self._decode(self._window)
        return new

    def finish(self) -> str:
        """Returns the text that waited for another token, now that none comes."""
        return self._new(self._decode(self._window))

    def _new(self, text: str) -> str:
        for given in (self._given, self._given.rstrip(_BROKEN)):  # half a character may have been made whole
            if text.startswith(given):
                return text[len(given) :]
        # Some decoders show a run of bytes as broken as a whole, with the characters before that were whole.
        return self._decode(self._window[self._before :])


class StreamedText:
    """A text that is continued, token by token, until it ends.

    Args:
      decode: gives the text of ids; None: there is no tokenizer, and no text.
      stop: strings that end the text, none of them empty; of several, the one that is complete first.
      before: tokens of the text before.
      eos_ids: tokens that end the text.

    Attributes:
      ids: the tokens, without the one that ended the text.
      text: what was handed out, which ends before the stop string.
      ended_by: the token or the stop string that ended the text; None: none has.
    """

    def __init__(
        self, decode: Decode | None, stop: Sequence[str] = (), before: Sequence[int] = (), eos_ids: Collection[int] = ()
    ):
        self.ids: list[int] = []
        self.text = ""
        self.ended_by: int | str | None = None
        self._stop, self._eos_ids = tuple(stop), eos_ids
        self._held = ""
        self._tokens = None if decode is None else Detokenizer(decode, before)

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is certain with it. The possible beginning of a stop string waits."""
        if token in self._eos_ids:
            self.ended_by = token
            return ""
        self.ids.append(token)
        return "" if self._tokens is None else self._take(self._tokens.push(token), ends=False)

    def finish(self) -> str:
        """Returns the text that waited, now that no token comes any more."""
        return "" if self._tokens is None else self._take(self._tokens.finish(), ends=True)

    def _take(self, new: str, *, ends: bool) -> str:
        if isinstance(self.ended_by, str):
            return ""
        held = self._held + new
        # The first to be complete, as if characters came one by one, in however large pieces they come.
        found = [(held.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in held]
        if found:
            end, length, self.ended_by = min(found)
            at = end + length
        else:
            at = len(held) if ends else len(held) - max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[at:]
        self.text += held[:at]
        return held[:at]


def check_in_vocabulary(tokens: Sequence[int], vocab_size: int, name: str = "token ids") -> None:
    """Raises `InputError`, which begins with their name, if tokens are none of the model's."""
    if outside := sorted({token for token in tokens if not 0 <= token < vocab_size}):
        raise InputError(f"{name} {outside[:5]} lie outside the vocabulary of {vocab_size}")


def stream_texts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    wanted: GenerateSpec,
    texts: Sequence[StreamedText],
    on_text: OnText | None = None,
    **how: Any,
) -> Iterator[int]:
    """Pushes the tokens that `stream` yields to the texts of the prompts, until all have ended.

    Before every step it yields for how many texts there is a token. `on_text` is called as texts come, with the index
    of one and its next piece.
    """
    ended = np.zeros(len(texts), bool)
    for tokens in stream(model, prompts, wanted, ended=ended, **how):
        yield int((~ended).sum())
        for index in np.flatnonzero(~ended).tolist():
            piece = texts[index].push(int(tokens[index]))
            ended[index] = texts[index].ended_by is not None
            if piece and on_text is not None:
                on_text(index, piece)
        if ended.all():
            break
    for index, text in enumerate(texts):
        if (piece := text.finish()) and on_text is not None:
            on_text(index, piece)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins, but less than all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
