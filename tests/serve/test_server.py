"""The server as clients see it: OpenAI's own, and bytes on a socket."""

import concurrent.futures
import dataclasses
import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.generation import engine
from moe_jax.generation.texts import StreamedText
from moe_jax.serve import app
from moe_jax.serve.openai import MOST_VALUES
from moe_jax.serve.prompts import PromptReader
from moe_jax.serve.scheduler import Scheduler
from tests.support.byte_tokenizer import BOS
from tests.support.numerics import logits_of
from tests.support.served_models import CONTEXT, client_of, serving
from tests.support.tiers import long


@pytest.fixture(scope="module")
def address(model):
    with serving(model, Scheduler(model.decoder, slots=4, waiting=64)) as address:
        yield address


@pytest.fixture
def client(address):
    return client_of(address)


def greedy(model, prompt, **options):
    return moe_jax.generate(model, prompt, **options)


def post(address: str, path: str, body: bytes) -> tuple[int, dict, dict]:
    """Status, headers and JSON of an answer."""
    request = urllib.request.Request(f"{address}/v1/{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


def health(address: str) -> dict:
    with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
        return json.load(answer)


def test_the_model_is_listed(client):
    import openai

    (found,) = client.models.list().data
    assert found.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_conversation_is_answered_as_generate_does(client, model):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hé"}]
    expected = greedy(model, messages, max_new_tokens=12)
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(expected.prompt_ids) and answer.usage.completion_tokens == 12
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].usage == answer.usage
    told = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    content = told.choices[0].logprobs.content
    assert len(content) == 5 and all(one.logprob == one.top_logprobs[0].logprob for one in content)
    assert [len(one.top_logprobs) for one in content] == [2] * 5


def test_completions_of_texts_and_ids(client, model):
    expected = [greedy(model, prompt, max_new_tokens=9).text for prompt in ("ab", "c")]
    answer = client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=9, temperature=0)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage.completion_tokens == 18
    ids = client.completions.create(model="tiny", prompt=[[BOS, 97, 98], [BOS, 99]], max_tokens=9, temperature=0)
    assert [choice.text for choice in ids.choices] == expected
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=9, temperature=0, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_texts_end_before_stop_strings_and_stop_tokens(client, model):
    free = greedy(model, "ab", max_new_tokens=40)
    stop = free.text[5:8]
    expected = greedy(model, "ab", max_new_tokens=40, stop=stop)
    assert expected.reason == "stop"
    options = dict(model="tiny", prompt="ab", max_tokens=40, temperature=0)
    answer = client.completions.create(stop=["never", stop], **options)
    assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(expected.ids)
    chunks = list(client.completions.create(stop=stop, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    token = free.ids[6]
    answer = client.completions.create(extra_body={"stop_token_ids": [token]}, **options)
    expected = greedy(model, "ab", max_new_tokens=40, stop_ids=[token])
    assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "stop"


def test_answers_end_with_the_eos_of_the_model_unless_it_is_ignored(model, served_dir):
    free = greedy(model, "ab", max_new_tokens=12)
    ends = moe_jax.load(served_dir)
    ends.decoder.config = dataclasses.replace(ends.config, eos_ids=(free.ids[4],))
    with serving(ends, Scheduler(ends.decoder, slots=1)) as address:
        asked = {"model": "tiny", "prompt": "ab", "max_tokens": 12, "temperature": 0}
        _, _, answer = post(address, "completions", json.dumps(asked).encode())
        assert answer["choices"][0]["text"] == greedy(ends, "ab").text and answer["usage"]["completion_tokens"] <= 5
        assert answer["choices"][0]["finish_reason"] == "stop"
        _, _, answer = post(address, "completions", json.dumps({**asked, "stop_token_ids": [7]}).encode())
        assert answer["choices"][0]["text"] == greedy(ends, "ab").text  # they are added to those of the model
        _, _, answer = post(address, "completions", json.dumps({**asked, "ignore_eos": True}).encode())
        assert answer["choices"][0]["text"] == free.text and answer["usage"]["completion_tokens"] == 12
        # What scores a text asks for one token more, and takes the last log-probability away: there has to be one.
        scored = {
            "model": "tiny",
            "prompt": [BOS, *b"ab", *free.ids[:4]],
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        }
        _, _, answer = post(address, "completions", json.dumps(scored).encode())
        told = answer["choices"][0]
        assert told["text"] == "<s>ab" + ends.tokenizer.decode(free.ids[:4]) and told["finish_reason"] == "stop"
        assert len(told["logprobs"]["tokens"]) == len(told["logprobs"]["token_logprobs"]) == 8


def requests() -> list[dict]:
    """16 of different lengths, greedy and not, that end in different ways; one goes on to the end of the context."""
    found = []
    for index in range(16):
        prompt = np.random.default_rng(index).integers(0, 256, 40 if index == 5 else 1 + 2 * index).tolist()
        one = {"prompt": prompt, "max_tokens": 5 + 7 * (index % 5), "temperature": 0.0}
        if index % 3 == 1:
            one |= {"temperature": 0.5 + index / 10, "seed": index}
        if index % 6 == 1:
            one |= {"top_p": 0.8}
        if index == 5:
            one |= {"max_tokens": CONTEXT - len(prompt)}
        if index % 4 == 2:
            one |= {"extra_body": {"stop_token_ids": [index, 100 + index]}}
        found.append(one)
    return found


@long
def test_16_requests_at_once_are_answered_as_one_at_a_time(client, model):
    def ask(request: dict) -> tuple[str, str, int]:
        answer = client.completions.create(model="tiny", **request)
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens

    asked = requests()
    alone = [ask(request) for request in asked]
    before = engine.continue_rows._cache_size(), engine.read_prompts._cache_size()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, asked)) == alone
    # 2 and 4 rows, and both lengths of caches, have their programs; no way of sampling has one, and no mixture of rows.
    assert engine.continue_rows._cache_size() - before[0] <= 4 and engine.read_prompts._cache_size() == before[1]
    assert len({text for text, _, _ in alone}) == 16
    for request, (text, reason, _) in [(asked[index], alone[index]) for index in (1, 2, 4)]:
        stop_ids = request.get("extra_body", {}).get("stop_token_ids", [])
        options = {key: request[key] for key in ("temperature", "seed", "top_p") if key in request}
        expected = moe_jax.generate(
            model, request["prompt"], max_new_tokens=request["max_tokens"], stop_ids=stop_ids, **options
        )
        assert text == expected.text and reason == ("stop" if expected.stopped else "length")


def test_log_probabilities_are_those_of_the_model(client, model):
    prompt = [BOS, *b"some text that is scored"]
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=5
    ).choices[0]
    told = answer.logprobs
    added = greedy(model, prompt, max_new_tokens=3)
    assert answer.text == "<s>some text that is scored" + added.text
    ids = [*prompt, *added.ids]
    scores = np.asarray(jax.nn.log_softmax(logits_of(model.decoder, jnp.asarray([ids]))[0], axis=-1))
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None and len(told.tokens) == len(ids)
    expected = [scores[at, token] for at, token in enumerate(ids[1:])]
    np.testing.assert_allclose(told.token_logprobs[1:], expected, atol=1e-5)
    for at, top in enumerate(told.top_logprobs[1:]):
        assert max(top.values()) == pytest.approx(scores[at].max(), abs=1e-5) and 5 <= len(top) <= 6
    # The greedy tokens are the most likely ones, to the last bit: so clients find them.
    assert all(told.token_logprobs[at] == max(told.top_logprobs[at].values()) for at in (-1, -2, -3))
    only = client.completions.create(
        model="tiny", prompt=[prompt, prompt[:9]], max_tokens=0, temperature=0, echo=True, logprobs=1
    )
    np.testing.assert_array_equal(only.choices[0].logprobs.token_logprobs[1:], told.token_logprobs[1 : len(prompt)])
    assert len(only.choices[1].logprobs.token_logprobs) == 9 and only.usage.completion_tokens == 0


LONG = b'{"model": "tiny", "messages": [{"role": "user", "content": "%s"}]}'


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", b"{", 400, "not valid JSON"),
        ("completions", b"[1]", 400, "expected a JSON object"),
        ("completions", b'{"model": "other", "prompt": "a"}', 404, "'other' does not exist"),
        ("completions", b'{"model": 1, "prompt": "a"}', 400, "model: expected a name"),
        ("completions", b'{"model": "tiny", "prompt": {"a": 1}}', 400, "prompt: expected a text"),
        ("completions", b'{"model": "tiny", "prompt": [[258]]}', 400, "token id 258 lies outside"),
        ("completions", b'{"model": "tiny", "prompt": "a", "max_tokens": "9"}', 400, "max_tokens: expected an integer"),
        ("completions", b'{"model": "tiny", "prompt": "a", "max_tokens": 0}', 400, "max_tokens=0 goes with echo"),
        ("completions", b'{"model": "tiny", "prompt": "a", "max_tokens": 299}', 400, "context length is 300 tokens"),
        (
            "completions",
            b'{"model": "tiny", "prompt": [[97, 98], [97], [98]], "max_tokens": 299}',
            400,
            "prompt has 2 and",
        ),
        ("completions", b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "number from 0 to 2"),
        ("completions", b'{"model": "tiny", "prompt": "a", "top_p": 0}', 400, "top_p: expected a number above 0"),
        ("completions", b'{"model": "tiny", "prompt": "a", "stop": 3}', 400, "stop: expected a text"),
        ("completions", b'{"model": "tiny", "prompt": "a", "seed": 1.5}', 400, "seed: expected an integer"),
        ("completions", b'{"model": "tiny", "prompt": "a", "stream": "yes"}', 400, "stream: expected true"),
        ("completions", b'{"model": "tiny", "prompt": "a", "n": 2}', 400, "n=2 is not supported"),
        ("completions", b'{"model": "tiny", "prompt": "a", "logprobs": 21}', 400, "integer from 0 to 20"),
        ("completions", b'{"prompt": "a"}', 400, "model is missing"),
        ("completions", b'{"model": "tiny"}', 400, "prompt is missing"),
        ("completions", b'{"model": "tiny", "prompt": "\\ud83d"}', 400, "half of a character"),
        ("completions", b'{"model": "tiny", "prompt": "a", "\\ud83d": 1}', 400, "unknown field"),
        ("chat/completions", b'{"model": "tiny"}', 400, "messages is missing"),
        ("chat/completions", b'{"model": "tiny", "messages": "a"}', 400, "list of messages"),
        ("chat/completions", b'{"model": "tiny", "messages": [{"role": "usr"}]}', 400, "did you mean 'user'"),
        ("chat/completions", b'{"model": "tiny", "messages": [], "tools": [{}]}', 400, "not supported"),
        # Six tokens more: the BOS, the roles and the end of a line.
        ("chat/completions", LONG % (b"a" * 294), 400, "prompt has 300 and"),
        ("embeddings", b"{}", 404, "/v1/embeddings: Not Found"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(address, path, body, status, message):
    got, _, answer = post(address, path, body)
    assert got == status and message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_request_of_too_many_values_is_not_parsed(address):
    got, _, answer = post(address, "completions", b"[" * (MOST_VALUES + 1))
    assert got == 400 and f"{MOST_VALUES:,} values" in answer["error"]["message"]


class Gated(Scheduler):
    """A scheduler that makes a block of one token for every permit."""

    def __init__(self, *arguments, **options):
        self.permits = threading.Semaphore(0)
        self.given = 0
        super().__init__(*arguments, **options)

    def _continue(self):
        self.permits.acquire()
        self.seconds_a_block, self.given = 0.0, self.given + 1
        return super()._continue()

    def close(self):
        self._closing = True  # what goes on for want of a permit makes one block more
        self.permits.release(10_000)
        super().close()


def until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_who_finds_the_queue_full_may_come_again(model):
    import openai

    scheduler = Gated(model.decoder, slots=1, waiting=1)
    with serving(model, scheduler) as address, concurrent.futures.ThreadPoolExecutor(2) as pool:
        client = client_of(address)

        def ask():
            return client.completions.create(model="tiny", prompt="ab", max_tokens=3, temperature=0).choices[0].text

        answers = [pool.submit(ask)]
        until(lambda: health(address)["running"] == 1)
        answers.append(pool.submit(ask))
        until(lambda: health(address) == {"status": "ok", "running": 1, "waiting": 1})
        status, headers, body = post(address, "completions", b'{"model": "tiny", "prompt": "ab"}')
        assert status == 429 and int(headers["retry-after"]) >= 1 and body["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            ask()
        scheduler.permits.release(100)
        assert [one.result(30) for one in answers] == [greedy(model, "ab", max_new_tokens=3).text] * 2
        assert ask() == answers[0].result()


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_leaves_its_slot(model, streams):
    import openai

    scheduler = Gated(model.decoder, slots=1, waiting=4)
    with serving(model, scheduler) as address:
        client = client_of(address)
        if streams:
            stream = client.completions.create(model="tiny", prompt="ab", max_tokens=200, temperature=0, stream=True)
            next(iter(stream))
            stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.5).completions.create(
                    model="tiny", prompt="ab", max_tokens=200, temperature=0
                )
        # Its slot is free after a block or so: the next one is answered.
        until(lambda: scheduler.permits.release() or time.sleep(0.05) or health(address)["running"] == 0)
        assert scheduler.given < 100
        scheduler.permits.release(100)
        other = client.completions.create(model="tiny", prompt="c", max_tokens=3, temperature=0)
        assert other.choices[0].text == greedy(model, "c", max_new_tokens=3).text


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_leaves_the_queue(model, streams):
    import openai

    scheduler = Gated(model.decoder, slots=1, waiting=1)
    with serving(model, scheduler) as address, concurrent.futures.ThreadPoolExecutor(2) as pool:

        def ask(**options):
            asking = client_of(address).with_options(**options).completions
            return asking.create(
                model="tiny", prompt="ab", max_tokens=3, temperature=0, stream=streams and bool(options)
            )

        answers = [pool.submit(ask)]
        until(lambda: health(address)["running"] == 1)
        for _ in range(3):  # each of them would fill the queue
            if streams:
                ask(timeout=60).close()
            else:
                with pytest.raises(openai.APITimeoutError):
                    ask(timeout=0.2)
            until(lambda: health(address)["waiting"] == 0)
        answers.append(pool.submit(ask))
        until(lambda: health(address)["waiting"] == 1)
        scheduler.permits.release(100)
        assert len({answer.result(30).choices[0].text for answer in answers}) == 1


def test_more_prompts_than_ever_find_a_place_are_refused_at_once(address):
    body = {"model": "tiny", "prompt": ["a"] * 69, "max_tokens": 1}
    status, _, answer = post(address, "completions", json.dumps(body).encode())
    assert status == 400 and answer["error"]["param"] == "prompt"


def test_a_long_request_keeps_nobody_waiting(model, monkeypatch):
    """Reading it takes until others have been answered. As many are read at once as are answered and wait."""
    answered = threading.Event()
    read = PromptReader.of

    def slowly(self, given, *, echo=False):
        assert len(given) < 10_000 or answered.wait(30)
        return read(self, given, echo=echo)

    monkeypatch.setattr(PromptReader, "of", slowly)
    body = json.dumps({"model": "tiny", "prompt": "a" * 100_000}).encode()
    short = b'{"model": "tiny", "prompt": "ab", "max_tokens": 1}'
    scheduler = Scheduler(model.decoder, slots=1, waiting=1)
    with serving(model, scheduler) as address, concurrent.futures.ThreadPoolExecutor(2) as pool:
        long = [pool.submit(post, address, "completions", body)]
        time.sleep(0.1)
        assert health(address)["status"] == "ok" and post(address, "completions", short)[0] == 200
        long.append(pool.submit(post, address, "completions", body))
        time.sleep(0.2)
        assert post(address, "completions", short)[0] == 429
        assert not any(one.done() for one in long)
        answered.set()
        assert [one.result(30)[0] for one in long] == [400, 400]


def test_a_request_that_does_not_come_is_not_waited_for(address, monkeypatch):
    monkeypatch.setattr(app, "_SECONDS_OF_BODY", 0.1)
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as half:
        half.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert half.recv(100).startswith(b"HTTP/1.1 408 ")


def test_what_is_answered_when_the_server_ends_is_told(model):
    """Also in a stream, of which clients await the end."""
    scheduler = Gated(model.decoder, slots=1, waiting=4)
    with serving(model, scheduler) as address, concurrent.futures.ThreadPoolExecutor(2) as pool:
        body = b'{"model": "tiny", "prompt": "a", "max_tokens": 99, "temperature": 0%s}'
        answer = pool.submit(post, address, "completions", body % b"")
        stream = urllib.request.Request(f"{address}/v1/completions", body % b', "stream": true')
        events = pool.submit(lambda: urllib.request.urlopen(stream, timeout=60).read().decode().split("\n\n"))
        until(lambda: health(address) == {"status": "ok", "running": 1, "waiting": 1})
        scheduler.close()
        status, _, body = answer.result(30)
        assert status == 500 and body["error"]["message"] == "the server is shutting down"
        *_, error, done, _ = events.result(30)
        assert done == "data: [DONE]" and json.loads(error.removeprefix("data: ")) == body
        assert post(address, "completions", b'{"model": "tiny", "prompt": "a"}')[0] == 503


def test_logits_that_are_not_finite_end_their_request_alone(model, served_dir):
    broken = moe_jax.load(served_dir)
    embedding = broken.decoder.embed.embedding
    embedding[...] = embedding[...].at[ord("x")].set(math.nan)
    with serving(broken, Scheduler(broken.decoder, slots=1)) as address:
        status, _, body = post(address, "completions", b'{"model": "tiny", "prompt": "x", "temperature": 0}')
        assert status == 500 and "not finite" in body["error"]["message"]
        answer = client_of(address).completions.create(model="tiny", prompt="ab", max_tokens=2, temperature=0)
        assert answer.choices[0].text == greedy(model, "ab", max_new_tokens=2).text


def test_equal_prompts_are_sampled_apart_unless_a_seed_is_given(client):
    how = {
        "model": "tiny",
        "prompt": ["ab"] * 3,
        "max_tokens": 8,
        "temperature": 1.0,
        "extra_body": {"ignore_eos": True},
    }
    free, fixed = (client.completions.create(**how, **seed).choices for seed in ({}, {"seed": 3}))
    assert len({choice.text for choice in free}) == 3 and len({choice.text for choice in fixed}) == 1


@pytest.mark.parametrize("streams", [True, False])
def test_what_fails_while_an_answer_is_written_is_told(client, monkeypatch, streams):
    import openai

    def fails(self, token):
        raise InputError("no text")

    monkeypatch.setattr(StreamedText, "push", fails)
    with pytest.raises(openai.APIError, match="server failed: InputError"):
        list(client.completions.create(model="tiny", prompt="ab", max_tokens=4, stream=streams))


def test_more_tokens_that_end_a_text_than_there_is_room_for_are_refused(model, monkeypatch):
    monkeypatch.setattr(app, "MOST_STOP_IDS", 3)
    scheduler = Scheduler(model.decoder, slots=1, waiting=1)
    with serving(model, scheduler) as address:
        body = json.dumps({"model": "tiny", "prompt": "a", "stop_token_ids": [5, 6, 7]})
        status, _, answer = post(address, "completions", body.encode())
    assert status == 400 and answer["error"]["param"] == "stop_token_ids"
    monkeypatch.setattr(app, "MOST_STOP_IDS", 0)
    with pytest.raises(InputError, match="tokens that end"):
        app.App(model, model.tokenizer, scheduler, "tiny")
