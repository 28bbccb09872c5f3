"""The verb generate: continues or answers prompts, and says why every text ends."""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, overload

import numpy as np

from moe_jax.api.measure import tokenizer_of, why_not_finite
from moe_jax.api.model import Loading, Model, ModelOrPath, open_model, with_options
from moe_jax.core.errors import InputError, shown
from moe_jax.data.chat_template import Message, load_chat_template
from moe_jax.data.end_tokens import end_tokens
from moe_jax.data.pictures.picture_messages import conversation_text, places_of, taken_pictures
from moe_jax.distributed.processes import is_first_process
from moe_jax.generation.engine import SECONDS_SEEN
from moe_jax.generation.pictures import given_picture, see_prompts
from moe_jax.generation.spec import GenerateSpec, Picture
from moe_jax.generation.texts import (
    FIRST_BLOCK,
    NonFiniteLogits,
    OnText,
    StreamedText,
    check_in_vocabulary,
    stream_texts,
)

Prompt = str | Sequence[int] | np.ndarray | Sequence[Message]
P = ParamSpec("P")
Reason = Literal["eos", "stop_id", "stop", "length"]


class Continuation(NamedTuple):
    """A prompt and the text that `generate` added to it.

        >>> continued = moe_jax.generate(moe_jax.tiny_model(), [1, 2, 3], max_new_tokens=4)
        >>> continued.prompt_ids, len(continued.ids), continued.reason
        ([1, 2, 3], 4, 'length')

    Attributes:
      prompt: its text; None without a tokenizer.
      prompt_ids: its tokens, BOS included where the tokenizer puts one, and before an encoder the EOS that ends it; for
        a picture, as many placeholders as it has features.
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
      per_second: tokens per second after the first block, in which the program is compiled; None for a shorter text.
    """

    tokens: int
    first: float
    seconds: float
    per_second: float | None


class GenerateVerb(Protocol[P]):
    """The type of `generate`; `P` are the fields of `GenerateSpec`."""

    @overload
    def __call__(self, model: ModelOrPath, prompt: Prompt, spec: GenerateSpec, /) -> Continuation: ...
    @overload
    def __call__(self, model: ModelOrPath, prompt: Sequence[Prompt], spec: GenerateSpec, /) -> list[Continuation]: ...
    @overload
    def __call__(self, model: ModelOrPath, prompt: Prompt, *args: P.args, **options: P.kwargs) -> Continuation: ...
    @overload
    def __call__(
        self, model: ModelOrPath, prompt: Sequence[Prompt], *args: P.args, **options: P.kwargs
    ) -> list[Continuation]: ...


def _generate_verb(spec: Callable[P, GenerateSpec]) -> Callable[[Callable[..., Any]], GenerateVerb[P]]:
    return lambda do: with_options(spec, do)


@_generate_verb(GenerateSpec)
def generate(
    model: ModelOrPath, prompt: Prompt | Sequence[Prompt], spec: GenerateSpec
) -> Continuation | list[Continuation]:
    """Continues a prompt, or several as one batch. Greedy texts do not depend on the other prompts.

    What is sampled depends on the seed, and on a prompt's place among the others.

    For a model with an encoder, the prompt is the input of the encoder, and the generated text is the answer to it.

    Nothing stops a text from growing beyond `model.config.max_positions`, for which the model was trained.

        >>> one, two = moe_jax.generate(moe_jax.tiny_model(), [[1, 2, 3], [4]], max_new_tokens=4)
        >>> one.ids == moe_jax.generate(moe_jax.tiny_model(), [1, 2, 3], max_new_tokens=4).ids
        True

    Args:
      model: a model, or the path of one.
      prompt: a text, before which BOS is put where the tokenizer does so, and after which EOS is put for an encoder; or
        token ids, taken as they are; or a conversation, `[{"role": "user", "content": "..."}]`, written by the chat
        template of the tokenizer up to where the answer begins; or a list of such prompts. A content may also be a list
        of parts, `{"type": "text", "text": "..."}` and `{"type": "image", "image": ...}`, with the path of a picture,
        its pixels UInt8[H, W, 3], a data URL or base64.
      spec: the options.

    Returns:
      One `Continuation`; for a list of prompts, a list of them.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: for a prompt of another form or an empty one, bad sampling options, a text or a stop string for a
        model without tokenizer, a conversation for one without chat template, a picture for one that does not see or
        that cannot be read, another number of pictures than of placeholders, or logits that are not finite.
    """
    single = _is_one(prompt)
    prompts: list[Any] = [prompt] if single else list(prompt)
    if not isinstance(model, Model):
        source = open_model(model)
        model = Model.of_source(source, Loading.for_generation(source, rows=len(prompts)))
    chat = any(is_conversation(one) for one in prompts)
    prompts, spec = with_pictures_apart(prompts, spec)
    sees = bool(spec.images)
    results, _ = continue_prompts(model, [prompt_ids(one, model, pictures=sees) for one in prompts], spec, chat=chat)
    return results[0] if single else results


def with_pictures_apart(prompts: Sequence[Prompt], wanted: GenerateSpec) -> tuple[list[Any], GenerateSpec]:
    """Takes pictures out of conversations, where parts hold them: they become those that the options have.

    Returns prompts and options; raises `InputError` for pictures in both, or for a part that holds none.
    """
    pictures: list[Picture] = []
    made: list[Any] = []
    for prompt in prompts:
        taken = taken_pictures(prompt, given_picture) if is_conversation(prompt) else None
        made.append(prompt if taken is None else taken.messages)
        pictures += () if taken is None else taken.pictures
    if pictures and wanted.images:
        raise InputError("pictures are parts of messages, or given by image (--image) for `<image>` in texts; not both")
    return made, dataclasses.replace(wanted, image=tuple(pictures)) if pictures else wanted


def continue_prompts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    wanted: GenerateSpec,
    on_text: OnText | None = None,
    *,
    chat: bool = False,
) -> tuple[list[Continuation], Speed]:
    """Continues prompts given as tokens; errors as of `generate`, and `on_text` as of `stream_texts`.

    With `chat`, the token that ends a turn in a conversation ends the texts, too.
    """
    if not prompts:
        raise InputError("nothing to continue: there is no prompt")
    eos, tokenizer = eos_ids(model, chat=chat), model.tokenizer
    if wanted.stops:
        tokenizer_of(model, "a stop string", "name tokens that end a text (--stop-ids)")
    check_in_vocabulary(wanted.stop_ids, model.config.vocab_size, "stop_ids")
    stop_ids = (*eos, *wanted.stop_ids)
    decode = None if tokenizer is None else tokenizer.decode
    given, pictures = see_prompts(model.config, prompts, wanted.images, remark=_note)
    befores = [() if model.config.has_encoder else prompt for prompt in given]
    texts = [StreamedText(decode, wanted.stops, before, stop_ids) for before in befores]
    decoder, start = model.decoder, time.perf_counter()
    arrivals: list[tuple[float, int]] = []  # when a step came, and for how many rows
    try:
        for count in stream_texts(
            decoder,
            given,
            wanted,
            texts,
            on_text,
            eos_ids=stop_ids,
            pictures=pictures,
            seconds=None if on_text is None else SECONDS_SEEN,
        ):
            arrivals.append((time.perf_counter() - start, count))
    except NonFiniteLogits as error:
        raise InputError(f"{error}: {why_not_finite(model)}") from None
    made = [
        _continuation(model, prompt, text, eos)._replace(prompt_ids=ids)
        for prompt, ids, text in zip(prompts, given, texts, strict=True)
    ]
    return made, _speed(arrivals)


def _note(line: str) -> None:
    if is_first_process():
        print(f"moe-jax: note: {line}", file=sys.stderr)


def _continuation(model: Model, prompt: Sequence[int], made: StreamedText, eos: Sequence[int]) -> Continuation:
    tokenizer, by = model.tokenizer, made.ended_by
    reason: Reason = "length" if by is None else "stop" if isinstance(by, str) else "eos" if by in eos else "stop_id"
    if isinstance(by, int):
        by = str(by) if tokenizer is None else tokenizer.token(by)
    before, text = (None, None) if tokenizer is None else (tokenizer.decode(prompt), made.text)
    return Continuation(before, list(prompt), text, made.ids, reason != "length", reason, by)


def _speed(arrivals: Sequence[tuple[float, int]]) -> Speed:
    counts, times = [count for _, count in arrivals], [at for at, _ in arrivals]
    after = 1 + FIRST_BLOCK
    seconds = times[-1] - times[after - 1] if len(arrivals) > after else 0.0
    rate = sum(counts[after:]) / seconds if seconds > 0 else None
    return Speed(sum(counts), times[0], times[-1], rate)


def prompt_ids(prompt: Prompt, model: Model, *, pictures: bool = False) -> list[int]:
    """Returns the tokens of a prompt of any form that `generate` takes; raises the same errors.

    With `pictures`, texts have places for some (`Tokenizer.encode`); those of conversations are taken out before
    (`with_pictures_apart`).
    """
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(model, "a text prompt", "give the prompt as token ids (--ids)")
        if model.config.has_encoder:
            return tokenizer.inputs(prompt).tolist()
        return tokenizer.prompt(prompt, pictures=pictures and model.config.vision is not None).tolist()
    if is_conversation(prompt):
        tokenizer = tokenizer_of(model, "a conversation", "give the prompt as token ids (--ids)")
        messages: Any = prompt
        template = load_chat_template(tokenizer.path)
        if not pictures:
            return tokenizer.encode(template(messages, add_generation_prompt=True)).tolist()
        model.config.check_sees("pictures in prompts")
        text = conversation_text(messages, places_of(messages), template)
        return tokenizer.encode(text, pictures=True).tolist()
    given: Any = np.asarray(prompt).tolist() if hasattr(prompt, "__array__") else prompt
    if not isinstance(given, Sequence) or not all(_is_token(token) for token in given):
        raise InputError(f"a prompt is {shown(prompt)}, expected a text, token ids or a conversation")
    check_in_vocabulary(given, model.config.vocab_size)
    return [int(token) for token in given]


def _is_token(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def _is_one(prompt: Any) -> bool:
    """Whether it is one prompt, and not several."""
    if isinstance(prompt, str) or is_conversation(prompt) or not hasattr(prompt, "__len__"):
        return True
    return len(prompt) > 0 and (getattr(prompt[0], "ndim", None) == 0 or not hasattr(prompt[0], "__len__"))


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def eos_ids(model: Model, *, chat: bool = False) -> tuple[int, ...]:
    """Returns the tokens that end a text, or with `chat` an answer in a conversation; see `end_tokens`."""
    return end_tokens(model.config, model.tokenizer_files, model.lineage, model.tokenizer, chat=chat)
