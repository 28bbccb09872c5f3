"""The processes of a job, each connected with the first: what ends one of them ends all, at once and with one line.

JAX's own service notices a process that is gone by its silence, after minutes, and then aborts the others with a stack
of C++ functions. Nor does it say why a process ended. So every process has a thread that holds a connection to the
first one, by which both know at once if the other is killed; by which a process that fails says why; and over which
silence is noticed too, where a whole host stopped.

The first process listens at the address that everyone is given. JAX's service listens behind it, on a port that only
the first host can reach, and all that others say to it goes through here. When the first process dies, JAX's clients in
the others therefore see a connection that stays open, and leave it to this module to say what happened.

Nothing here imports JAX.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import queue
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from moe_jax.core.errors import InputError, printable

T = TypeVar("T")

_GREETING = b"moe_jax "
_HTTP2 = b"PRI * HT"  # with which JAX's clients begin, as all of gRPC
_LONGEST_LINE = 1 << 20
# So long the first process waits for the rest, once it knows that the job cannot be: all are to hear why.
_GRACE = 20.0


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process among all processes of a job.

    Attributes:
      address: host and port at which the first process listens.
      count: of processes.
      index: of this one, from 0.
      local_devices: indices of the accelerators of this machine that are this process's; None: all.
    """

    address: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None

    @property
    def port(self) -> int:
        """Port at which the first process listens."""
        return int(self.address.rpartition(":")[2])

    @property
    def host(self) -> str:
        """Host on which the first process listens."""
        return self.address.rpartition(":")[0].strip("[]")


class Peers:
    """The connection of this process with the others.

    Args:
      place: where this process stands.
      equal: what has to be the same in all processes, by name, as text.
      wait: seconds after which processes that have not come are given up.
      silence: seconds after which a process that says nothing is taken to be dead.
    """

    def __init__(self, place: Place, equal: Mapping[str, str], *, wait: float, silence: float):
        self._place = place
        self._hello = {"index": place.index, "equal": {"number of processes": str(place.count), **equal}}
        self._hello["host"] = platform.node()[:200]
        self._wait = wait
        self._silence = silence
        self._loop = asyncio.new_event_loop()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._hosts: dict[int, str] = {place.index: self._hello["host"]}
        self._left: set[int] = set()
        self._tasks: set[asyncio.Task] = set()
        self._ending = threading.Lock()
        # Of the first process: what the others said when they came, and the port of JAX's service.
        self._hellos: dict[int, dict[str, Any]] = {}
        self._problems: list[str] = []
        self._news = asyncio.Event()
        self._open = True
        self._beats_every = min(5.0, silence / 4, wait / 4)
        self._service = _free_port() if place.index == 0 else 0
        # A signal that one of the processes got, the step after which all stop, and who has not heard of it yet.
        self._signal: int | None = None
        self._last_step: int | None = None
        self._unaware: set[int] = set()
        self._all_know = asyncio.Event()
        self._finished: asyncio.Future[int] = self._loop.create_future()
        self._news_of_work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failed = False
        # How many times this process, and in the first every other, has come to a meeting, and how many all have.
        self._meetings = 0
        self._arrivals = dict.fromkeys(range(place.count), 0)
        self._met = 0
        self._all_met = asyncio.Condition()

    def join(self) -> str:
        """Waits until all processes have come.

        Returns:
          The address on this host at which JAX's service is reached.

        Raises:
          InputError: if not all come in time, if two of them do not fit each other, or if the port is taken.
        """
        threading.Thread(target=self._loop.run_forever, name="peers", daemon=True).start()
        return self._do(self._begin() if self._place.index == 0 else self._come())

    def fail(self, code: int, message: str) -> None:
        """Tells the others that this process ends, and why: they end too. For a process that is about to end.

        What it says first is what counts.
        """
        if self._failed:
            return
        self._failed = True
        self._ending.acquire()
        with contextlib.suppress(Exception):
            self._do(self._tell_end({"index": self._place.index, "code": code, "text": message}), timeout=5)

    def finish(self) -> None:
        """Tells the others that this process is done, so that its end is no accident."""
        with contextlib.suppress(Exception):
            self._do(self._say(json.dumps({"left": self._place.index})), timeout=5)

    def meet(self) -> None:
        """Returns when every process has made as many of these calls, however long that takes."""
        self._meetings += 1
        self._do(self._meet(self._meetings))

    def tell_first(self, news: Any) -> None:
        """Tells the first process, which is not this one, how far the work is; JSON-able, and short."""
        self._do(self._say(json.dumps({"news": news})))

    def news(self, seconds: float) -> list[Any]:
        """Returns what the others have told this process, the first, since the last call; waits a while for it."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._news_of_work.get(timeout=seconds) if seconds else self._news_of_work.get_nowait())
            while True:
                found.append(self._news_of_work.get_nowait())
        return found

    def ask_to_stop(self, number: int) -> None:
        """Asks all processes to stop after one of the next steps, because of a signal."""
        if self._place.index == 0:
            self._signal = number
        else:
            self._do(self._say(json.dumps({"stop": number})))

    def stop_after(self, step: int) -> int | None:
        """The signal because of which all processes stop after this step; None: they go on.

        Every process makes this call after it has started a step, and none is ahead of another by more than one of
        them. So when the first one asks for a stop, and waits until all know of it, nobody is beyond the next step.
        """
        if self._place.index == 0 and self._signal is not None and self._last_step is None:
            self._do(self._announce(step + 2))
        return self._signal if self._last_step == step else None

    def wait_for_first(self) -> None:
        """Returns when the first process is done."""

        async def wait() -> int:
            return await self._finished

        self._do(wait())

    async def _meet(self, number: int) -> None:
        if self._place.index == 0:
            await self._arrive(0, number)
        else:
            await self._say(json.dumps({"arrived": number, "index": self._place.index}))
        async with self._all_met:
            await self._all_met.wait_for(lambda: self._met >= number)

    async def _arrive(self, index: int, number: int) -> None:
        """In the first process: another, or itself, has come to a meeting."""
        self._arrivals[index] = number
        if min(self._arrivals.values()) > self._met:
            await self._say(json.dumps({"met": min(self._arrivals.values())}))
            await self._have_met(min(self._arrivals.values()))

    async def _have_met(self, number: int) -> None:
        async with self._all_met:
            self._met = number
            self._all_met.notify_all()

    def _do(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    # -- the first process

    async def _begin(self) -> str:
        try:
            await asyncio.start_server(self._accept, None, self._place.port, limit=_LONGEST_LINE)
        except OSError as error:
            raise InputError(f"cannot listen at port {self._place.port} for the other processes: {error}") from None
        self._keep(self._beat())
        end = time.monotonic() + self._wait
        while len(self._hellos) < self._place.count - 1:
            if self._problems:
                end = min(end, time.monotonic() + _GRACE)
            try:
                await asyncio.wait_for(self._news.wait(), end - time.monotonic())
            except TimeoutError:
                break
            self._news.clear()
        missing = [str(index) for index in range(1, self._place.count) if index not in self._hellos]
        if missing and not self._problems:
            self._problems = [
                f"of {self._place.count} processes, these did not come in {self._wait:.0f} s: "
                f"{', '.join(missing)} (they count from 0)"
            ]
        self._open = False
        if self._problems:
            refusal = "; ".join(sorted(set(self._problems)))
            await self._say(json.dumps({"refused": refusal}))
            await asyncio.sleep(0.2)  # until it is sent
            raise InputError(refusal)
        hosts = {str(index): host for index, host in self._hosts.items()}
        await self._say(json.dumps({"welcome": hosts}))
        return f"127.0.0.1:{self._service}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, KeyError, TypeError):
            first = await asyncio.wait_for(reader.readexactly(len(_GREETING)), self._silence)
            if first == _HTTP2:
                await self._pass_on(first, reader, writer, "127.0.0.1", self._service)
            elif first == _GREETING and self._open:
                await self._welcome(reader, writer)
        writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await asyncio.wait_for(reader.readline(), self._silence))
        index, host, equal = int(hello["index"]), str(hello["host"])[:200], dict(hello["equal"])
        who = f"process {index} (on {printable(host)})"
        mine = self._hello["equal"]
        differ = [name for name in mine if equal.get(name) != mine[name]]
        if not 0 < index < self._place.count or index in self._hellos:
            there = f"is there already (on {printable(self._hosts.get(index, 'another host'))})"
            self._problems.append(
                f"{who} {there if index in self._hosts else 'has no place'} among {self._place.count} processes, "
                "which count from 0"
            )
            # It still has to hear of it, beside the one whose index it has.
            index = -1 - len(self._writers)
        for name in differ:
            theirs = printable(str(equal.get(name)))[:200]
            self._problems.append(f"{who} and the first do not fit: {name} is {theirs} there, and {mine[name]} here")
        self._writers[index], self._hellos[index], self._hosts[index] = writer, hello, host
        self._news.set()
        await self._listen(index, reader)

    async def _announce(self, step: int) -> None:
        self._last_step = step
        self._unaware = set(self._writers)
        await self._say(json.dumps({"stop_after": step, "signal": self._signal}))
        await self._all_know.wait()

    # -- the other processes

    async def _come(self) -> str:
        place, end = self._place, time.monotonic() + self._wait
        why: Exception | None = None
        beat: asyncio.Task[None] | None = None
        while True:
            try:
                left = min(10.0, end - time.monotonic())
                opened = asyncio.open_connection(place.host, place.port, limit=_LONGEST_LINE)
                reader, writer = await asyncio.wait_for(opened, max(left, 0.01))
                writer.write(_GREETING + json.dumps(self._hello).encode() + b"\n")
                await writer.drain()
                self._writers[0] = writer
                beat = self._keep(self._beat())
                # The first process waits for others; it may have come long after this one.
                welcome = await self._answer(reader, time.monotonic() + self._wait + _GRACE)
                break
            except (OSError, TimeoutError) as error:
                why = error
                self._writers.clear()
                if beat is not None:
                    beat.cancel()
            if time.monotonic() >= end:
                said = "it did not answer" if isinstance(why, TimeoutError) else str(why)
                raise InputError(
                    f"process {place.index} of {place.count} could not reach the first one at {place.address} in "
                    f"{self._wait:.0f} s ({said}): is it started, and is this its address?"
                )
            await asyncio.sleep(min(1.0, self._wait / 10))
        if "refused" in welcome:
            raise InputError(printable(str(welcome["refused"])))
        self._hosts = {int(index): str(host) for index, host in welcome["welcome"].items()}
        self._open = False
        self._keep(self._listen(0, reader))

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await self._pass_on(b"", reader, writer, place.host, place.port)

        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, end: float) -> dict[str, Any]:
        line = b"\n"
        while line == b"\n":
            # As long as it waits for others, it beats.
            line = await asyncio.wait_for(reader.readline(), min(3 * self._beats_every, end - time.monotonic()))
        if not line:
            raise ConnectionError("it closed the connection")
        try:
            answer = json.loads(line)
            if not isinstance(answer, dict) or not answer.keys() & {"welcome", "refused"}:
                raise ValueError
        except ValueError:
            raise ConnectionError("what answers there is no process of this library") from None
        return answer

    # -- all of them

    async def _pass_on(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        """Carries bytes between one of JAX's clients and the service, in both directions."""
        end = time.monotonic() + self._wait
        while True:
            try:
                there, back = await asyncio.open_connection(host, port)
                break
            except OSError:
                if time.monotonic() > end:  # the service starts after this
                    raise
                await asyncio.sleep(0.1)
        back.write(first)

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    target.write(data)
                    await target.drain()

        answers = asyncio.ensure_future(carry(there, writer))
        await carry(reader, back)
        back.close()
        # The other direction is left as it is: JAX would abort this process if the service went away.
        await answers

    async def _listen(self, index: int, reader: asyncio.StreamReader) -> None:
        """Hears what another process says, as long as it does."""
        who = self._name(index)
        while True:
            try:
                line = await asyncio.wait_for(reader.readline(), self._silence)
            except TimeoutError:
                await self._lose(index, f"{who} has said nothing for {self._silence:.0f} s: its host, or the network")
                return
            except (OSError, ValueError):
                line = b""
            if not line:
                if index not in self._left and not self._open:
                    # Where a process left, others hear of it from the first one and not from its connection.
                    await self._lose(index, f"{who} is gone: it was killed, or its host stopped")
                elif self._open:
                    self._hellos.pop(index, None)
                    self._writers.pop(index, None)
                return
            if line.strip():
                await self._hear(json.loads(line))

    async def _hear(self, said: dict[str, Any]) -> None:
        if "left" in said:
            self._left.add(int(said["left"]))
            if said["left"] == 0 and not self._finished.done():
                self._finished.set_result(0)
        elif "news" in said:
            self._news_of_work.put(said["news"])
        elif "arrived" in said:
            await self._arrive(int(said["index"]), int(said["arrived"]))
        elif "met" in said:
            await self._have_met(int(said["met"]))
        elif "stop" in said:
            self._signal = self._signal or int(said["stop"])
        elif "stop_after" in said:
            self._signal, self._last_step = int(said["signal"]), int(said["stop_after"])
            await self._say(json.dumps({"knows": self._place.index}))
        elif "knows" in said:
            self._unaware.discard(int(said["knows"]))
            if not self._unaware:
                self._all_know.set()
        elif "ended" in said:
            ended = said["ended"]
            if self._place.index == 0:
                await self._tell_end(ended)
            text = printable(str(ended["text"]))
            who = "" if ended.get("lost") else f"{self._name(int(ended['index']))} ended: "
            self._end(int(ended["code"]), f"{who}{text}")

    async def _lose(self, index: int, text: str) -> None:
        if self._place.index == 0:
            await self._tell_end({"index": index, "code": 1, "text": text, "lost": True})
        self._end(1, text)

    async def _tell_end(self, ended: dict[str, Any]) -> None:
        await self._say(json.dumps({"ended": ended}), to_all_but=ended["index"])
        await asyncio.sleep(0.2)  # until it is sent

    async def _say(self, line: str, *, to_all_but: int | None = None) -> None:
        for index, writer in list(self._writers.items()):
            if index != to_all_but:
                with contextlib.suppress(OSError, RuntimeError):
                    writer.write(line.encode() + b"\n")

    async def _beat(self) -> None:
        while True:
            await self._say("")
            await asyncio.sleep(self._beats_every)

    def _end(self, code: int, text: str) -> None:
        """Ends this process, unless it is ending already and has its own reason."""
        if self._ending.acquire(blocking=False):
            _exit(code or 1, f"error: {text}; this process ends too")

    def _name(self, index: int) -> str:
        host = f", on {printable(self._hosts[index])}" if index in self._hosts else ""
        return f"process {index} ({index + 1} of {self._place.count}{host})"

    def _keep(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts a task, which asyncio itself would not hold on to."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _exit(code: int, message: str) -> NoReturn:
    # The main thread may be in the middle of a line, or wait for ever in a collective: it is not asked.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"moe-jax: {message}\n".encode())
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
