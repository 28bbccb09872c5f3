"""Connections whose requests do not come, with a server that answers everything, and is in a hurry."""

import asyncio
import contextlib
import signal
import socket
import time
from functools import partial

import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from moe_jax.serve.app import App
from moe_jax.serve.connections import BoundedProtocol, Server, server_config

SECONDS = 0.3
WHOLE = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n"


async def answer(scope, receive, send):
    """Answers late: no deadline is for the answer."""
    await receive()
    await asyncio.sleep(SECONDS * 1.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def served(most=10):
    """Opens connections."""
    config, state = uvicorn.Config(answer, log_level="critical", timeout_keep_alive=60), ServerState()
    make = partial(BoundedProtocol, config=config, server_state=state, app_state={}, most=most, seconds=SECONDS)
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with server:
        yield lambda: asyncio.open_connection(*server.sockets[0].getsockname())


async def ends(reader) -> tuple[bytes, float]:
    begin = time.monotonic()
    return await asyncio.wait_for(reader.read(), 10), time.monotonic() - begin


async def drip(writer) -> None:
    with contextlib.suppress(OSError):
        for _ in range(100):
            writer.write(b"x")
            await asyncio.sleep(SECONDS / 10)


def test_a_request_whose_headers_do_not_come_is_given_up():
    async def check():
        async with served() as connect:
            (silent, _), (half, halves), (slow, drips) = [await connect() for _ in range(3)]
            halves.write(WHOLE[:20])
            drips.write(WHOLE[:-4] + b"x: ")
            dripping = asyncio.create_task(drip(drips))
            found = await asyncio.gather(*map(ends, (silent, half, slow)))
            dripping.cancel()
        assert found[0][0] == b"" and all(b"408" in content for content, _ in found[1:])
        assert all(SECONDS / 2 < seconds < 20 * SECONDS for _, seconds in found)

    asyncio.run(check())


def test_a_slow_body_and_a_late_answer_are_no_matter_and_the_next_request_is_timed_too():
    async def check():
        async with served() as connect:
            reader, writer = await connect()
            writer.write(WHOLE)
            await asyncio.sleep(SECONDS * 1.5)
            writer.write(b"{}")
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok"), 10)
            writer.write(WHOLE[:20])
            assert b"408" in (await ends(reader))[0]
            reader, writer = await connect()
            writer.write(WHOLE + b"{}" + WHOLE[:20])  # the next begins before the answer
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok"), 10)
            assert b"408" in (await ends(reader))[0]

    asyncio.run(check())


def test_one_connection_too_many_is_closed_at_once():
    async def check():
        async with served(most=1) as connect:
            first, writer = await connect()
            for _ in range(2):
                with contextlib.suppress(ConnectionError):
                    assert await ends((await connect())[0]) < (b"", SECONDS / 2)
            writer.write(WHOLE + b"{}")
            assert b"200 OK" in await asyncio.wait_for(first.readuntil(b"ok"), 10)
            writer.close()
            await asyncio.sleep(0.05)
            reader, writer = await connect()
            writer.write(WHOLE + b"{}")
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok"), 10)

    asyncio.run(check())


def test_the_server_has_room_for_all_that_wait_and_more():
    config = server_config(answer, requests=1000, log_level="error")
    assert config.http.func is BoundedProtocol and config.http.keywords["most"] > 1000


@pytest.mark.parametrize("seconds", [0.05, 60.0])
def test_who_waits_when_the_server_ends_is_told(caplog, capsys, seconds):
    """An answer that does not end by itself is told to, in time, or at once by a second signal, and people why."""
    said: list[str] = []

    async def check():
        stopped, asked = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            asked.set()
            await stopped.wait()
            await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"no"})

        server = Server(server_config(app, requests=1, log_level="error"), stopped.set, seconds, said.append)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            running = asyncio.create_task(server._serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(WHOLE + b"{}")
            await asyncio.wait_for(asked.wait(), 10)
            server.handle_exit(signal.SIGTERM, None)
            if seconds > 1:
                server.handle_exit(signal.SIGINT, None)
            assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"no")
            writer.close()
            await asyncio.wait_for(running, 10)

    asyncio.run(check())
    assert [line.partition(":")[0] for line in said] == ["stopping"] * (seconds < 1)
    assert not caplog.records and capsys.readouterr().err == ""  # uvicorn writes there itself


def test_what_is_cancelled_at_the_end_is_no_bug(monkeypatch):
    async def cancelled(*_):
        raise asyncio.CancelledError

    monkeypatch.setattr(Starlette, "__call__", cancelled)
    asyncio.run(App.__call__(App.__new__(App), {"type": "lifespan"}, None, None))
