"""Pictures in requests: read as `generate` reads them, together with texts, once each; and what is refused."""

import base64
import concurrent.futures
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
import zlib

import numpy as np
import openai
import pytest

import moe_jax
from moe_jax.images.picture_files import PictureFolder
from moe_jax.serve.asked_pictures import MOST_PICTURES
from moe_jax.serve.scheduler import Scheduler
from tests.serve.conftest import CONFIG, write_served
from tests.support.drawn_pictures import png
from tests.support.seeing_models import FEATURES, seeing
from tests.support.served_models import client_of, serving
from tests.support.tiers import long


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model over bytes that sees, without a token for pictures."""
    return moe_jax.load(write_served(tmp_path_factory.mktemp("sees"), seeing(CONFIG)))


@pytest.fixture(scope="module")
def shown_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "a.png").write_bytes(png(1))
    (folder / "text.png").write_text("no picture")
    (folder.parent / "outside.png").write_bytes(png(2))
    return folder


@pytest.fixture(scope="module")
def scheduler(model):
    return Scheduler(model.decoder, slots=4, waiting=64)


@pytest.fixture(scope="module")
def address(model, scheduler, shown_folder):
    with serving(model, scheduler, pictures=PictureFolder(shown_folder)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return client_of(address)


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def part(address: str) -> dict:
    return {"type": "image_url", "image_url": {"url": address, "detail": "auto"}}


def asking(*parts) -> list[dict]:
    """A message of texts and pictures: bytes, or the URL of some."""
    content = [
        {"type": "text", "text": one} if isinstance(one, str) else part(url(one) if isinstance(one, bytes) else one[0])
        for one in parts
    ]
    return [{"role": "user", "content": content}]


def answered(client, messages, **options):
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}, **options
    )


def test_an_answer_is_that_of_generate(model, client):
    messages = asking(png(1), "what is", png(2), "that?")
    expected = moe_jax.generate(model, messages, max_new_tokens=6)
    found = answered(client, messages)
    if not expected.stopped:
        assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == len(expected.prompt_ids) and found.usage.prompt_tokens > 2 * FEATURES
    swapped = asking(png(2), "what is", png(1), "that?")
    first, second = (answered(client, one, logprobs=True).choices[0].logprobs.content for one in (messages, swapped))
    assert abs(first[0].logprob - second[0].logprob) > 1e-4
    pieces = [chunk.choices[0].delta.content for chunk in answered(client, messages, stream=True) if chunk.choices]
    assert "".join(filter(None, pieces)) == found.choices[0].message.content


def test_at_once_as_alone_and_every_picture_is_looked_at_once(client, scheduler):
    asked = [asking(png(7), "a"), asking("no picture"), asking(png(8), png(7), "b"), asking(png(7), "c" * 40)]
    before = scheduler.looked
    alone = [answered(client, messages).choices[0].message.content for messages in asked]
    assert scheduler.looked - before == 2
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda messages: answered(client, messages), asked * 2))
    assert [one.choices[0].message.content for one in together] == alone * 2
    assert scheduler.looked - before == 2


def test_names_are_inside_of_the_folder(client, shown_folder):
    by_name = answered(client, asking(("a.png",), "a"))
    assert by_name.choices[0].message.content == answered(client, asking(png(1), "a")).choices[0].message.content
    for name in ("b.png", "../outside.png", str(shown_folder / "a.png"), "file:a.png", f"file://{shown_folder}/a.png"):
        with pytest.raises(openai.BadRequestError) as error:
            answered(client, asking((name,), "a"))
        assert str(shown_folder) not in error.value.message.replace(name, "")


def bomb() -> bytes:
    """A PNG of 100,000 x 100,000 pixels, by its header."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    side = (100_000).to_bytes(4, "big")
    head = chunk(b"IHDR", side + side + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


REFUSED = {
    "on the network": (asking(("https://x.org/a.png",)), "not from elsewhere"),
    "a file of the server": (asking(("file:///etc/passwd",)), "not from elsewhere"),
    "no base64": (asking(("data:image/png;base64,@@@@",)), "not base64"),
    "no picture": (asking(b"no picture at all"), "not a picture"),
    "cut off": (asking(png(1)[:100]), "damaged"),
    "a bomb": (asking(bomb()), "million"),
    "too many": (asking(*[png(1)] * (MOST_PICTURES + 1)), f"at most {MOST_PICTURES}"),
    "too long": (asking(*[png(1)] * MOST_PICTURES, "a" * 200), "context"),
    "no url": ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "expected the name"),
    "nothing": ([{"role": "user", "content": [{"type": "image_url"}]}], "holds nothing"),
    "a mark in a text": (asking(png(1), "<image>"), "<image>"),
    "a mark elsewhere": ([{"role": "system", "content": "<image>"}, *asking(png(1), "a")], "<image>"),
    "in an answer": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": [part(url(png(1)))]}],
        "is an answer",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused(client, wrong):
    messages, said = REFUSED[wrong]
    with pytest.raises(openai.BadRequestError) as error:
        answered(client, messages)
    assert error.value.status_code == 400 and said in error.value.message
    assert len(error.value.message) < 500


def test_without_a_folder_no_name_is_taken(model):
    with serving(model, Scheduler(model.decoder, slots=1)) as address, client_of(address) as client:
        with pytest.raises(openai.BadRequestError, match="is no picture"):
            answered(client, asking(("a.png",), "a"))


def test_a_client_that_goes_away_while_its_picture_is_looked_at(address, client, scheduler, monkeypatch):
    eye, looking, may_end = scheduler._eye, threading.Event(), threading.Event()
    look = eye._program

    def slowly(*given):
        looking.set()
        assert may_end.wait(30)
        return look(*given)

    monkeypatch.setattr(eye, "_program", slowly)
    body = json.dumps({"model": "tiny", "messages": asking(png(30), "a"), "max_tokens": 200, "stream": True})
    host, port = address.removeprefix("http://").split(":")
    leaving = http.client.HTTPConnection(host, int(port))
    leaving.request("POST", "/v1/chat/completions", body)
    assert looking.wait(30)
    leaving.close()
    may_end.set()
    monkeypatch.undo()
    assert answered(client, asking("a")).usage.completion_tokens == 6
    deadline = time.monotonic() + 30
    while any((load := scheduler.load()).values()):
        assert time.monotonic() < deadline, load
        time.sleep(0.01)


@long
def test_whatever_comes_is_answered_or_refused(address):
    rng = np.random.default_rng(0)
    values = [
        None,
        1,
        [],
        {},
        "",
        "a.png",
        url(png(1)),
        url(png(1)[:60]),
        url(b""),
        "data:image/png;base64,",
        {"url": 3},
    ]
    values += [
        {"url": url(png(2))},
        {"url": "a" * 5000},
        {"url": "\ud800"},
        {"url": "data:,"},
        {"url": url(png(3), "x" * 99)},
    ]
    good = [{"url": url(png(number))} for number in range(12)]
    counts = {200: 0, 400: 0}
    for _ in range(300):
        parts = []
        for _ in range(rng.integers(1, 5)):
            kind = str(rng.choice(["image_url", "image", "input_image", "text", "image_url", "other"]))
            some = good if rng.random() < 0.6 else values
            value = some[rng.integers(len(some))]
            parts.append({"type": kind, kind: value} if rng.random() < 0.9 else value)
        role = str(rng.choice(["user", "user", "user", "assistant", "system"]))
        body = {"model": "tiny", "messages": [{"role": role, "content": parts}], "max_tokens": 2}
        request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            status = error.code
        counts[status] += 1
    assert min(counts.values()) > 30
