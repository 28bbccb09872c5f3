"""Connections of the server: their number is bounded, and a request has to begin in time.

uvicorn has a time-out for connections between two requests only, and its `limit_concurrency` answers requests with
status 503, which open connections that never send one bring about.
"""

import asyncio
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_OF_HEADERS = 20.0
"""In which the headers of a request have to come, from the opening of the connection, or from their first byte."""
SPARE_CONNECTIONS = 256
"""Connections beside those of the requests that are answered or wait."""
SECONDS_TO_END = 10.0
"""In which answers have to end after the signal that ends the server."""
_SECONDS_TO_HEAR = 2  # of clients that they get no answer


def server_config(app: ASGIApp, *, requests: int, **options: Any) -> uvicorn.Config:
    """Returns the configuration of a server for so many requests at a time; `options` are uvicorn's."""
    protocol = partial(BoundedProtocol, most=requests + SPARE_CONNECTIONS)
    options = {"timeout_graceful_shutdown": int(SECONDS_TO_END) + _SECONDS_TO_HEAR, "lifespan": "off"} | options
    return uvicorn.Config(app, http=cast(Any, protocol), **options)


class Server(uvicorn.Server):
    """A server that ends in time, and tells those who wait for an answer before it cancels what is left.

    Args:
      config: from `server_config`.
      stop: called, in the event loop, when answers have to end.
      seconds: in which they may end by themselves. A second signal ends them at once; a third one waits for nothing.
      say: called, in the event loop, with a sentence on what is waited for, as soon as there is something.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        stop: Callable[[], object],
        seconds: float = SECONDS_TO_END,
        say: Callable[[str], object] = lambda text: None,
    ):
        super().__init__(config)
        self._stop, self._seconds, self._say = stop, seconds, say
        self._ending: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Hears of a signal."""
        if not self.should_exit or not self._seconds:
            super().handle_exit(signal.SIGINT if self.should_exit else sig, frame)  # uvicorn: no other one twice
            return
        self._seconds = 0.0
        if self._ending is not None:
            self._ending.call_soon_threadsafe(self._stop)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends all connections."""
        self._ending = asyncio.get_running_loop()
        # Not in the handler of the signal, which may have interrupted who writes there.
        if (left := len(self.server_state.tasks)) and self._seconds:
            answers = f"{left} answer{'s' * (left > 1)}"
            self._say(f"stopping: {answers} may end within {self._seconds:g} seconds; another signal ends them now")
        late = self._ending.call_later(self._seconds, self._stop)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()


class BoundedProtocol(H11Protocol):
    """A connection of uvicorn's that is closed if the headers of a request do not come in time.

    Args:
      most: connections of the server; one more is closed at once.
      seconds: until headers have to be there.
    """

    def __init__(self, *arguments: Any, most: int, seconds: float = SECONDS_OF_HEADERS, **options: Any):
        super().__init__(*arguments, **options)
        self._most, self._seconds = most, seconds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, unless there are too many."""
        if len(self.connections) >= self._most:
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Takes bytes of requests."""
        super().data_received(data)
        # Bytes that complete nothing do not move the deadline.
        if self.conn.their_state is h11.IDLE:
            self._expect_headers()
        else:
            self._forget_headers()

    def on_response_complete(self) -> None:
        """Waits for the next request, for as long as `timeout_keep_alive` says, or if it has begun, as the first."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._unset_keepalive_if_required()
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._forget_headers()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self._end)

    def _forget_headers(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        if not self.transport.is_closing():
            if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
