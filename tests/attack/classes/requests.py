"""Requests to `serve`: fields of all types and sizes, up to the prompts that they hold; no model answers."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.serve.fields import CHAT, COMPLETION, STREAM_OPTIONS
from moe_jax.serve.openai import MOST_VALUES, model_of, read_chat, read_completion
from moe_jax.serve.prompts import PromptReader
from moe_jax.serve.protocol_error import ProtocolError
from tests.attack.attacks import Attack
from tests.attack.classes.templates import of_templates
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import plain
from tests.support.dense_models import dense_config

FILE = "request.json"
CONTEXT, VOCABULARY, MOST_BYTES = 512, 258, 16 << 20
TEXTS = ("", "a", "\ud83d", "\ud83d\ude00", "e\u0301", "\0", "\u202e", "<s>", "</s>", "{{ 1 }}", "\n" * 9, "\u1e9e")
NUMBERS = (0, 1, -1, 0.5, 2, 10**400, -(10**30), 1e308, float("nan"), float("inf"), 1 << 31, 1 << 63, True, 257, 258)


def _text(rng: random.Random, most: int = 200_000) -> str:
    text = "".join(rng.choice(TEXTS) for _ in range(rng.choice((1, 2, 20))))
    return text * rng.choice((1, 1, 1, most // max(1, len(text))))


def _anything(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind < 2:
        return _text(rng, 200_000 if depth == 3 else 100)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind == 4:
        return rng.choice((None, {}, [], [[]]))
    if kind == 5:
        return {_text(rng)[:50]: _anything(rng, depth - 1) for _ in range(rng.choice((1, 3)))}
    one = _anything(rng, depth - 1)
    return _many(one, rng.choice((1, 2, 3, 200, 20_000)))


def _many(one: Any, count: int, most: int = 1_000_000) -> list[Any]:
    """A list of the same thing so often, but of no more than about so many characters."""
    if most > 1_000_000 and count > 1:
        count = most
    return [one] * min(count, 1 + most // len(repr(one)))


def _messages(rng: random.Random) -> Any:
    roles = ("user", "assistant", "system", "tool", "usr", "", 3, None)
    one: dict[str, Any] = {"role": rng.choice(roles[:6]), "content": _text(rng, 1000)}
    if rng.random() < 0.3:
        one[rng.choice(("role", "content", "name", "tool_calls"))] = _anything(rng)
    if rng.random() < 0.2:
        one["content"] = [{"type": "text", "text": _text(rng, 100)}] * rng.choice((1, 2, 5000, 140_000))
    if rng.random() < 0.1:
        call = {
            "id": "a",
            "type": "function",
            "function": {"name": "f", "arguments": rng.choice(('{"a": 1}', {}, "{"))},
        }
        one = {"role": "assistant", "content": "", "tool_calls": [call] * rng.choice((1, 9, 50_000))}
    return _many(one, rng.choice((1, 2, 3, 5000)), rng.choice((1_000_000, 10_000_000)))


def _many_keys(rng: random.Random) -> dict[str, Any]:
    return {f"{rng.choice('k0')}{i}": rng.choice(NUMBERS) for i in range(rng.choice((1, 999, 200_000)))}


def _deep(rng: random.Random) -> Any:
    one: Any = rng.choice(NUMBERS)
    for _ in range(rng.choice((9, 90, 99, 101, 900))):
        one = [one] if rng.random() < 0.5 else {"a": one}
    return one


def _prompt(rng: random.Random) -> Any:
    ids = [rng.choice((0, 65, 200, 255, 256, 257, 258, -1))] * rng.choice((1, 3, 511, 512, 513, 200_000))
    return rng.choice((_text(rng), ids, [_text(rng)] * rng.choice((1, 2, 128, 129)), [ids] * 2))


def _make(rng: random.Random, original: Any, folder: Path) -> None:
    body: dict[str, Any] = {"model": "m", "echo": rng.random() < 0.5, "max_tokens": rng.choice((0, 1, 16))}
    if is_chat := rng.random() < 0.5:
        body = {"model": "m", "messages": _messages(rng)}
    else:
        body["prompt"] = _prompt(rng)
    fields = (*(CHAT if is_chat else COMPLETION), "top_k", "n", "user", "tools", "temprature", "logit_bias")
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
        body[rng.choice(fields)] = rng.choice((_anything, _anything, _anything, _many_keys, _deep))(rng)
    if rng.random() < 0.1:
        body["stream_options"] = {rng.choice((*STREAM_OPTIONS, "x")): _anything(rng)}
    content = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        cut = rng.randrange(len(content))
        broken = content[:cut] + b"\xff" + content[cut:]
        digits = b'{"seed":' + b"9" * rng.choice((399, 401, 100_000)) + b"," + content[1:]
        twice = b'{"model":"m",' * 2 + content[1:]
        content = rng.choice((content[:cut], b"[" * 100_000 + content, broken, content * 2, digits, twice))
    (folder / FILE).write_bytes(content[:MOST_BYTES])


def _reader() -> PromptReader:
    with tempfile.TemporaryDirectory() as folder:
        file = byte_tokenizer(Path(folder) / "tokenizer.json", adds_bos=True)
        settings = {"chat_template": plain("chatml"), "bos_token": "<s>", "eos_token": "</s>"}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        reader = PromptReader(
            Tokenizer(file, dense_config(vocab_size=VOCABULARY)), vocab_size=VOCABULARY, context=CONTEXT
        )
        reader.of_conversation([{"role": "user", "content": "a"}])  # its template is read once
        return reader


# What writes outside of an input's folder is made beforehand.
_READERS: list[PromptReader] = []


def _original() -> None:
    _READERS.append(_reader())


def _read(folder: Path, out: Path) -> list[tuple[int, Any]]:
    content = (folder / FILE).read_bytes()
    try:
        body = parse_json(content, where="the request", allow=ANYTHING, max_values=MOST_VALUES)
        model_of(body)
        if "messages" in body:
            asked = read_chat(body)
            prompts = [_READERS[0].of_conversation(asked.messages)]
        else:
            asked = read_completion(body)
            prompts = [_READERS[0].of(prompt, echo=asked.echo) for prompt in asked.prompts]
    except ProtocolError as error:
        json.dumps(error.body())
        raise InputError(error.message) from None
    return [(len(prompt.ids), body) for prompt in prompts]


def _wrong(original: Any, folder: Path, read: list[tuple[int, Any]]) -> str | None:
    for size, body in read:
        if "messages" not in body and isinstance(body["prompt"], str):
            expected = len(body["prompt"].encode()) + 1  # a byte each, after BOS
            if size > expected:
                return f"{size} tokens of {expected} bytes"
    return None


ATTACKS = (
    Attack(
        name="requests",
        original=_original,
        make=_make,
        read=_read,
        wrong=_wrong,
        quick=30,
        share=100,
        max_seconds=1.0,
        max_bytes=300_000_000,
        besides=of_templates,
    ),
)
