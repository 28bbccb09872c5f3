"""Requests of the OpenAI protocol, read and checked; for fields that are not read see `fields`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_jax.core.errors import MAX_SIZE, InputError, is_finite, shown
from moe_jax.data.chat_template import check_messages
from moe_jax.data.pictures.picture_messages import taken_pictures
from moe_jax.data.pictures.picture_sources import PictureSource
from moe_jax.generation.continued_rows import MOST_STOP_IDS
from moe_jax.generation.engine import MOST_SCORES
from moe_jax.serve.asked_pictures import MOST_PICTURES, asked_picture
from moe_jax.serve.fields import CHAT, COMPLETION, STREAM_OPTIONS, check_fields
from moe_jax.serve.protocol_error import ProtocolError

MOST_STOPS = 16
"""Stop strings of a request; OpenAI's own server takes 4."""
MOST_PROMPTS = 128
"""Prompts of a request."""
MOST_VALUES = 600_000
"""Commas and opening brackets of a request; so many prompts of 4,096 token ids have fewer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request for texts, checked.

    Attributes:
      prompts: texts or token ids, each of which is answered.
      messages: the conversation that is answered instead; pictures in it are parts `{"type": "image"}`.
      pictures: of the conversation, in order.
      max_tokens: None: as many as there is room for.
      temperature, top_p, seed: see `functional.sampling.sample`.
      stop: strings that end an answer.
      stop_ids: tokens that do, besides the model's own.
      ignore_eos: whether the model's own do not.
      logprobs: how many of the most likely tokens are told of every token; None: no log-probability is.
      echo: whether the prompt is part of the answer.
      stream: whether the answer comes in pieces.
      include_usage: whether a stream ends with the number of tokens.
    """

    prompts: Sequence[str | list[int]] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    pictures: Sequence[PictureSource] = ()
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    echo: bool = False
    stream: bool
    include_usage: bool


def read_completion(body: Any) -> Request:
    """Returns a request to `/v1/completions`, checked; raises `ProtocolError` with status 400."""
    check_fields(body, COMPLETION)
    if body.get("prompt") is None:
        raise _missing("prompt")
    logprobs = _integer(body, "logprobs", None, 0, MOST_SCORES)
    max_tokens = _integer(body, "max_tokens", 16, 0, MAX_SIZE)
    return Request(
        prompts=_prompts(body["prompt"]),
        max_tokens=max_tokens,
        logprobs=logprobs,
        echo=_boolean(body, "echo"),
        **_common(body),
    )


def read_chat(body: Any, *, sees: bool = False) -> Request:
    """Returns a request to `/v1/chat/completions`, checked; errors as of `read_completion`.

    Messages may have pictures if the model `sees`.
    """
    check_fields(body, CHAT)
    if body.get("messages") is None:
        raise _missing("messages")
    try:
        given, pictures = taken_pictures(body["messages"], asked_picture) if sees else (body["messages"], ())
        messages = check_messages(given, pictures=sees)
    except InputError as error:
        raise ProtocolError(400, str(error), param="messages") from None
    if len(pictures) > MOST_PICTURES:
        problem = f"{len(pictures)} pictures in a request, at most {MOST_PICTURES} are taken"
        raise ProtocolError(400, problem, param="messages")
    wanted = _boolean(body, "logprobs")
    top = _integer(body, "top_logprobs", None, 0, MOST_SCORES)
    if top is not None and not wanted:
        raise ProtocolError(400, "top_logprobs goes with logprobs: true", param="top_logprobs")
    most = _integer(body, "max_tokens", None, 1, MAX_SIZE)  # the old name
    return Request(
        messages=messages,
        pictures=pictures,
        max_tokens=_integer(body, "max_completion_tokens", most, 1, MAX_SIZE),
        logprobs=(top or 0) if wanted else None,
        **_common(body),
    )


def model_of(body: Any) -> str:
    """Returns the name of the model that a request asks for, which OpenAI's own server requires, too."""
    if not isinstance(body, dict):
        raise ProtocolError(400, f"expected a JSON object, got {shown(body)}")
    name = _field(body, "model", None, "a name", lambda model: isinstance(model, str))
    if name is None:
        raise _missing("model")
    return name


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    options = _field(body, "stream_options", {}, "an object", lambda value: isinstance(value, dict))
    check_fields(options, STREAM_OPTIONS)
    seed = _integer(body, "seed", None, -(1 << 63), (1 << 63) - 1)
    temperature = _field(body, "temperature", 1.0, "a number from 0 to 2", lambda t: is_finite(t) and 0 <= t <= 2)
    top_p = _field(body, "top_p", 1.0, "a number above 0 and up to 1", lambda p: is_finite(p) and 0 < p <= 1)
    return {
        "temperature": float(temperature),
        "top_p": float(top_p),
        "seed": None if seed is None else seed % (1 << 32),
        "stop": _stops(body.get("stop")),
        "stop_ids": _stop_ids(body),
        "ignore_eos": _boolean(body, "ignore_eos"),
        "stream": _boolean(body, "stream"),
        "include_usage": _boolean(options, "include_usage"),
    }


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if not isinstance(value, list) or not value:
        raise _bad("prompt", value, "a text, token ids, or a list of them")
    if len(value) > MOST_PROMPTS:
        raise ProtocolError(400, f"{len(value)} prompts in a request, at most {MOST_PROMPTS} are taken", param="prompt")
    for one in value:
        if not (isinstance(one, str) or _is_ids(one)):
            raise _bad("prompt", one, "a text or token ids")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _bad("stop", value, "a text or a list of texts")
    if len(stops) > MOST_STOPS:
        raise ProtocolError(400, f"{len(stops)} stop strings, at most {MOST_STOPS} are taken", param="stop")
    return tuple(stop for stop in stops if stop)  # some clients send empty ones


def _stop_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    def is_right(ids: Any) -> bool:
        return isinstance(ids, list) and all(_is_integer(one) and 0 <= one < MAX_SIZE for one in ids)

    ids = _field(body, "stop_token_ids", [], "a list of token ids", is_right)
    if len(ids) > MOST_STOP_IDS // 2:
        raise ProtocolError(400, f"at most {MOST_STOP_IDS // 2} stop_token_ids are taken", param="stop_token_ids")
    return tuple(ids)


def _field(body: Mapping[str, Any], name: str, default: Any, expected: str, is_right: Callable[[Any], bool]) -> Any:
    """Returns a field of a request, the default where it is absent or null; `ProtocolError` if it is not right."""
    value = body.get(name)
    if value is not None and not is_right(value):
        raise _bad(name, value, expected)
    return default if value is None else value


def _integer(body: Mapping[str, Any], name: str, default: int | None, low: int, high: int) -> int | None:
    expected = f"an integer from {low} to {high}"
    return _field(body, name, default, expected, lambda value: _is_integer(value) and low <= value <= high)


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    return _field(body, name, False, "true or false", lambda value: isinstance(value, bool))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_integer, value))


def _missing(name: str) -> ProtocolError:
    return ProtocolError(400, f"the field {name} is missing", param=name, code="missing_required_parameter")


def _bad(name: str, value: Any, expected: str) -> ProtocolError:
    return ProtocolError(400, f"{name}: expected {expected}, got {shown(value)}", param=name)
