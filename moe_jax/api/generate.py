"""The verb generate: continues or answers prompts, and says why every text ends."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import numpy as np

from moe_jax.api.measure import tokenizer_of, why_not_finite
from moe_jax.api.model import Loading, Model, ModelOrPath, open_model
from moe_jax.core.errors import InputError, shown
from moe_jax.data.chat_template import Message, load_chat_template
from moe_jax.files.json_toml import ANYTHING, read_json_object
from moe_jax.generation.texts import FIRST_BLOCK, NonFiniteLogits, StreamedText, checked_stops, stream

Prompt = str | Sequence[int] | np.ndarray | Sequence[Message]
Reason = Literal["eos", "stop_id", "stop", "length"]
OnText = Callable[[int, str], object]

# While somebody reads along, text is shown ten times a second.
_SECONDS_A_BLOCK = 0.1


class Continuation(NamedTuple):
    """A prompt and the text that `generate` added to it.

        >>> continued = moe_jax.generate(moe_jax.tiny_model(), [1, 2, 3], max_new_tokens=4)
        >>> continued.prompt_ids, len(continued.ids), continued.reason
        ([1, 2, 3], 4, 'length')

    Attributes:
      prompt: its text; None without a tokenizer.
      prompt_ids: its tokens, BOS included where the tokenizer puts one, and before an encoder the EOS that ends it.
      text: the added text, up to the stop string if there was one; None without a tokenizer. With an encoder, the whole
        answer.
      ids: the added tokens, up to but without the one that ended the text, or up to the end of the stop string.
      stopped: whether the text ended before `max_new_tokens`.
      reason: why it ended: `eos`, a token that the model names as the end of texts; `stop_id`, another one that was
        asked for; `stop`, a stop string; `length`, `max_new_tokens`.
      ended_by: the token (as the tokenizer writes it, or its id) or the stop string that ended it; None for `length`.
    """

    prompt: str | None
    prompt_ids: list[int]
    text: str | None
    ids: list[int]
    stopped: bool
    reason: Reason
    ended_by: str | None


class Speed(NamedTuple):
    """The speed at which texts were generated.

    Attributes:
      tokens: number of tokens added to all prompts together, including the tokens that ended texts.
      first: seconds until every prompt had its first token: reading the prompts, and compiling.
      seconds: the whole time.
      per_second: tokens per second after the first block, in which the program is compiled; for a shorter text, after
        the first token.
    """

    tokens: int
    first: float
    seconds: float
    per_second: float


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Options of `generate`, checked by it."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()


@overload
def generate(
    model: ModelOrPath,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    stop: str | Sequence[str] = (),
) -> Continuation: ...
@overload
def generate(
    model: ModelOrPath,
    prompt: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    stop: str | Sequence[str] = (),
) -> list[Continuation]: ...
def generate(
    model: ModelOrPath,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    stop: str | Sequence[str] = (),
) -> Continuation | list[Continuation]:
    """Continues a prompt, or several as one batch. A prompt's result does not depend on the others.

    For a model with an encoder, the prompt is the input of the encoder, and the generated text is the answer to it.

    Nothing stops a text from growing beyond `model.config.max_positions`, for which the model was trained.

        >>> one, two = moe_jax.generate(moe_jax.tiny_model(), [[1, 2, 3], [4]], max_new_tokens=4)
        >>> one.ids == moe_jax.generate(moe_jax.tiny_model(), [1, 2, 3], max_new_tokens=4).ids
        True

    Args:
      model: a model, or the path of one.
      prompt: a text, before which BOS is put where the tokenizer does so, and after which EOS is put for an encoder; or
        token ids, taken as they are; or a conversation, `[{"role": "user", "content": "..."}]`, written by the chat
        template of the tokenizer up to where the answer begins; or a list of such prompts.
      max_new_tokens: at most so many tokens are added.
      temperature: divides the logits before sampling; 0 takes the most likely token.
      top_k: samples from this many of the most likely tokens.
      top_p: samples from the most likely tokens whose probabilities sum to this.
      seed: seed of sampling.
      stop_ids: tokens that end a text, besides those that the model names as EOS, in its config or in
        generation_config.json. Nothing else of that file is used: unless a temperature is asked for, no token is drawn.
      stop: strings that end a text and are not part of it; they are found in the text, whatever its tokens are.

    Returns:
      One `Continuation`; for a list of prompts, a list of them.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: for an empty prompt, bad sampling options, a text or a stop string for a model without tokenizer, a
        conversation for one without chat template, or logits that are not finite.
    """
    if not isinstance(model, Model):
        source = open_model(model)
        model = Model.of_source(source, Loading.for_generation(source))
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int | np.integer | Mapping))
    prompts: list[Any] = [prompt] if single else list(prompt)
    wanted = Wanted(max_new_tokens, temperature, top_k, top_p, seed, stop_ids, stop)
    results, _ = continue_prompts(model, [prompt_ids(one, model) for one in prompts], wanted)
    return results[0] if single else results


def continue_prompts(
    model: Model, prompts: Sequence[Sequence[int]], wanted: Wanted, on_text: OnText | None = None
) -> tuple[list[Continuation], Speed]:
    """Continues prompts given as tokens, as `generate` does.

    Args:
      model: the model.
      prompts: token ids.
      wanted: the options.
      on_text: called as texts come, with the index of a prompt and the next piece of its text. Not called without a
        tokenizer.

    Raises:
      InputError: as in `generate`.
    """
    if not prompts:
        raise InputError("nothing to continue: there is no prompt")
    eos, stops = eos_ids(model), checked_stops(wanted.stop)
    if stops:
        tokenizer_of(model, "a stop string", "name tokens that end a text (--stop-ids)")
    rows = [_Row(model, prompt, stops, {*eos}, {*wanted.stop_ids}) for prompt in prompts]
    ended = np.zeros(len(rows), bool)
    decoder, start = model.decoder, time.perf_counter()
    arrivals: list[tuple[float, int]] = []  # when a step came, and for how many rows
    try:
        for tokens in stream(
            decoder,
            prompts,
            max_new_tokens=wanted.max_new_tokens,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            key=jax.random.key(wanted.seed),
            eos_ids=(*eos, *wanted.stop_ids),
            ended=ended,
            seconds=None if on_text is None else _SECONDS_A_BLOCK,
        ):
            arrivals.append((time.perf_counter() - start, int((~ended).sum())))
            for index in np.flatnonzero(~ended):
                piece = rows[index].push(int(tokens[index]))
                ended[index] = rows[index].reason is not None
                if piece and on_text is not None:
                    on_text(int(index), piece)
            if ended.all():
                break
    except NonFiniteLogits as error:
        raise InputError(f"{error}: {why_not_finite(model)}") from None
    for index, row in enumerate(rows):
        piece = row.finish()
        if piece and on_text is not None:
            on_text(index, piece)
    return [row.continuation() for row in rows], _speed(arrivals)


def _speed(arrivals: Sequence[tuple[float, int]]) -> Speed:
    counts, times = [count for _, count in arrivals], [at for at, _ in arrivals]
    after = 1 + FIRST_BLOCK if len(arrivals) > 1 + FIRST_BLOCK else 1
    seconds = times[-1] - times[after - 1]
    rate = sum(counts[after:]) / seconds if seconds > 0 else sum(counts) / times[-1]
    return Speed(sum(counts), times[0], times[-1], rate)


class _Row:
    """A prompt and the tokens added to it so far."""

    def __init__(self, model: Model, prompt: Sequence[int], stops: Sequence[str], eos: set[int], stop_ids: set[int]):
        tokenizer = model.tokenizer
        before = () if model.config.has_encoder else prompt
        self.reason: Reason | None = None
        self._tokenizer, self._prompt, self._eos, self._stop_ids = tokenizer, list(prompt), eos, stop_ids
        self._text = None if tokenizer is None else StreamedText(tokenizer.decode, stops, before)
        self._ids: list[int] = []
        self._ended_by: str | None = None

    def push(self, token: int) -> str:
        """Adds a token; returns the text that no later token can change."""
        if token in self._eos or token in self._stop_ids:
            self.reason = "eos" if token in self._eos else "stop_id"
            self._ended_by = str(token) if self._tokenizer is None else self._tokenizer.token(token)
            return ""
        self._ids.append(token)
        return "" if self._text is None else self._noticing_stop(self._text.push(token))

    def finish(self) -> str:
        """Returns the text that was not returned yet."""
        piece = "" if self._text is None else self._noticing_stop(self._text.finish())
        self.reason = self.reason or "length"
        return piece

    def _noticing_stop(self, piece: str) -> str:
        if self._text is not None and self._text.stopped_by is not None:
            self.reason, self._ended_by = "stop", self._text.stopped_by
        return piece

    def continuation(self) -> Continuation:
        assert self.reason is not None
        tokenizer = self._tokenizer
        prompt = None if tokenizer is None else tokenizer.decode(self._prompt)
        text = None if self._text is None else self._text.text
        stopped = self.reason != "length"
        return Continuation(prompt, self._prompt, text, self._ids, stopped, self.reason, self._ended_by)


def prompt_ids(prompt: Prompt, model: Model) -> list[int]:
    """Returns the tokens of a prompt of any form that `generate` takes; raises the same errors."""
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(model, "a text prompt", "give the prompt as token ids (--ids)")
        return (tokenizer.inputs if model.config.has_encoder else tokenizer.prompt)(prompt).tolist()
    if len(prompt) and isinstance(prompt[0], Mapping):
        tokenizer = tokenizer_of(model, "a conversation", "give the prompt as token ids (--ids)")
        template: Any = load_chat_template(tokenizer.path)
        return tokenizer.encode(template(prompt, add_generation_prompt=True)).tolist()
    ids: Any = prompt
    return [int(token) for token in ids]


def eos_ids(model: Model) -> tuple[int, ...]:
    """Returns the tokens that end a text, those of generation_config.json included, where chat models name theirs."""
    file = next((file for file in model.tokenizer_files if file.name == "generation_config.json"), None)
    if file is None:
        return model.config.eos_ids
    eos = read_json_object(file, allow=ANYTHING).get("eos_token_id")
    more = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token in more:
        if type(token) is not int or not 0 <= token < model.config.vocab_size:
            raise InputError(f"{file}: eos_token_id {shown(token)} is no token of the vocabulary; mend or remove it")
    return (*model.config.eos_ids, *more)
