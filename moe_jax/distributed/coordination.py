"""The connection of the processes of a job, by JAX's coordination service: if one ends, all end, with one line.

JAX's service notices by its heartbeats which process is gone, and stores what processes tell each other. By itself it
would abort the others with a stack of C++ functions. So it is told to continue (`jax_enable_recoverability`), and a
thread of every process asks it which processes are left. When the first process dies, the service dies with it, and
JAX's client calls `_lost`.
"""

import contextlib
import ctypes
import itertools
import json
import math
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the service for a command of one process, and the hook; they are not public
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from moe_jax.core.errors import InputError, printable
from moe_jax.distributed.job_place import Place

_FOREVER = 20 * 24 * 3600 * 1000  # milliseconds
_HELLO, _ENDED, _NEWS, _STOP, _LAST = (f"moe_jax/{name}" for name in ("hello", "ended", "news", "stop", "last"))
_SECONDS_TO_BE_HEARD = 1.0
_SECONDS_TO_GIVE_UP = 3.0
_GONE = "is gone: it was killed, or its host stopped, or the network"


class Coordination:
    """The connection of this process with the others.

    After `wait` seconds, processes that have not come are given up; after `silence` without a heartbeat, one is
    considered dead.
    """

    def __init__(self, place: Place, *, wait: float, silence: float):
        self._place, self._wait, self._silence = place, wait, silence
        self._client: Any = None
        self._hosts: list[str] = []
        self._watches: list[threading.Thread] = []
        self._ending, self._leaving = threading.Lock(), threading.Event()
        self._failed = False
        self._meetings, self._told = itertools.count(), itertools.count()
        self._signal: int | None = None
        self._last_step: int | None = None

    def join(self, equal: Mapping[str, str], *, one_works: bool = False) -> None:
        """Waits until all processes have come.

        Args:
          equal: values, as text and by name, that must be equal in all processes.
          one_works: whether the first process computes alone, on its own devices: JAX is then not told of the others.

        Raises:
          InputError: if two processes do not fit each other, the first one is not reached, or the port is taken. If not
            all come in time, this process ends with exit code 2 and one line.
        """
        place = self._place
        _check_address(place, self._wait)
        # JAX has a service of its own by which processes agree on signals. With it processes have waited for each other
        # for ever, one for the service's answer and one in a collective.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_enable_recoverability", True)
        state = distributed.State() if one_works else distributed.global_state
        initialize = state.initialize if one_works else jax.distributed.initialize
        try:
            with _without_warnings(), _calling_when_lost(self._lost), self._no_longer_than_agreed():
                initialize(
                    place.address,
                    place.count,
                    place.index,
                    local_device_ids=None if one_works else place.local_devices,
                    cluster_detection_method="deactivate",
                    initialization_timeout=math.ceil(self._wait),
                    heartbeat_timeout_seconds=math.ceil(self._silence),
                )
        except RuntimeError:
            raise InputError(self._apart()) from None
        self._state, self._client = state, state.client
        number = "number of processes"
        hello = {"host": platform.node()[:200], "equal": {number: str(place.count), **equal}}
        self._client.key_value_set(f"{_HELLO}/{place.index}", json.dumps(hello))
        hellos = [self._hello(0)]
        hellos += map(self._hello, range(1, int(hellos[0]["equal"][number])))
        self._hosts = [printable(hello["host"]) for hello in hellos]
        watches = (self._await_end, self._watch_others)
        self._watches = [threading.Thread(target=watch, name="coordination", daemon=True) for watch in watches]
        for watch in self._watches:
            watch.start()
        first = hellos[0]["equal"]
        problems = [
            f"process {index} (on {self._hosts[index]}) and the first do not fit: {name} is "
            f"{printable(str(theirs['equal'].get(name)))[:200]} there, and {here} here"
            for index, theirs in enumerate(hellos)
            for name, here in first.items()
            if theirs["equal"].get(name) != here
        ]
        if problems:
            raise InputError("; ".join(problems))

    @contextlib.contextmanager
    def _no_longer_than_agreed(self) -> Iterator[None]:
        """Ends this process if the block has not ended when the others are given up.

        JAX's client has this limit, too, but has waited far beyond it where the first process ended while this one
        connected.
        """
        limit = threading.Timer(self._wait + _SECONDS_TO_GIVE_UP, self._lost)
        limit.daemon = True
        limit.start()
        try:
            yield
        finally:
            limit.cancel()

    def _hello(self, index: int) -> dict[str, Any]:
        """Returns what a process said when it came."""
        return json.loads(self._client.blocking_key_value_get(f"{_HELLO}/{index}", math.ceil(1000 * self._wait)))

    def fail(self, code: int, message: str) -> None:
        """Tells the others that this process ends, and why, so that they end too. For a process that is about to end.

        The first message counts. If this process is being ended because of another one, whose reason was said, the call
        does not return, so that nothing more is said.
        """
        if self._client is None:
            return
        if not self._ending.acquire(blocking=False):
            if not (self._failed or self._leaving.is_set()):
                threading.Event().wait()
            return
        self._failed = True
        ended = {"index": self._place.index, "code": code, "text": message}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
            self._client.key_value_set(_ENDED, json.dumps(ended))
        if self._place.index == 0:
            time.sleep(_SECONDS_TO_BE_HEARD)  # the service ends with this process

    def leave(self) -> None:
        """Returns when all processes have made this call, however long that takes; their ends are then no failures."""
        self._meet_at("moe_jax/leave")
        self._ending.acquire()
        self._leaving.set()
        self._meet_at("moe_jax/left")
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(_ENDED, json.dumps({}), allow_overwrite=True)
            if self._place.index == 0:
                # The service is needed until the others have left it.
                while len(self._client.get_live_nodes(list(range(self._place.count)))) > 1:
                    time.sleep(0.05)
            self._state.shutdown()
        for watch in self._watches:  # C++ would call into a Python that has ended
            watch.join(timeout=10)
        self._client = None

    def meet(self) -> None:
        """Returns when every process has made as many of these calls, however long that takes."""
        self._meet_at(f"moe_jax/meet/{next(self._meetings)}")

    def tell_first(self, news: Any) -> None:
        """Tells the first process, from another one, about progress; JSON-able, and short."""
        self._client.key_value_set(f"{_NEWS}/{self._place.index}-{next(self._told)}", json.dumps(news))

    def news(self, seconds: float) -> list[Any]:
        """Returns what the others have told the first process since its last call; waits a while if there is nothing.

        In the others there is nothing.
        """
        if self._place.index:
            return []
        end = time.monotonic() + seconds
        while not (found := self._client.key_value_dir_get(_NEWS)) and time.monotonic() < end:
            time.sleep(0.1)
        for key, _ in found:
            self._client.key_value_delete(key)
        return [json.loads(news) for _, news in found]

    def ask_to_stop(self, number: int) -> None:
        """Asks all processes to stop after one of the next steps, because of a signal."""
        if self._place.index == 0:
            self._signal = number
        else:
            self._client.key_value_set(_STOP, str(number), allow_overwrite=True)

    def stop_after(self, step: int) -> int | None:
        """Returns the signal because of which all processes stop after this step; None: they go on.

        Every process makes this call after it has started a step, and starts none before the last but one is computed,
        by all. So when a process asks about a step, the first one has returned from this call for the last but two.
        """
        if self._last_step is None and self._place.index == 0:
            asked = self._signal or self._read(_STOP)
            if asked:
                self._signal, self._last_step = int(asked), step + 3
                self._client.key_value_set(_LAST, json.dumps([self._last_step, self._signal]))
        elif self._last_step is None and (last := self._read(_LAST)):
            self._last_step, self._signal = json.loads(last)
        return self._signal if self._last_step == step else None

    def await_reason(self) -> None:
        """Waits until this process must have been told of another one's end, with which it ends itself."""
        time.sleep(self._silence + 2)

    def _meet_at(self, barrier: str) -> None:
        try:
            self._client.wait_at_barrier(barrier, _FOREVER)
        except jax.errors.JaxRuntimeError:
            self.await_reason()
            raise

    def _read(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            self.await_reason()
            raise

    def _await_end(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_lost` says so
            ended = json.loads(self._client.blocking_key_value_get(_ENDED, _FOREVER))
            if not ended:
                return
            text = f"{self._name(int(ended['index']))} ended: {printable(str(ended['text']))}"
            if self._place.index == 0:
                time.sleep(_SECONDS_TO_BE_HEARD)
            self._end(int(ended["code"]) or 1, text)

    def _watch_others(self) -> None:
        everybody = range(self._place.count)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while not (gone := set(everybody) - self._client.get_live_nodes(list(everybody)).keys()):
                self._leaving.wait(1.0)
            names = ", ".join(map(self._name, sorted(gone)))
            if self._place.index == 0:
                time.sleep(_SECONDS_TO_BE_HEARD)
            self._end(1, f"{names} {_GONE}")

    def _lost(self, *_: object) -> None:
        """Ends this process; called by JAX's client, in a thread of its own, where it would abort.

        That is when it could not join, or has lost the service.
        """
        if self._hosts:
            self._end(1, f"{self._name(0)} {_GONE}")
        elif self._ending.acquire(blocking=False):
            _exit(2, f"error: {self._apart()}")
        threading.Event().wait()  # this process is ending, and has its own reason

    def _apart(self) -> str:
        """Returns the line that is said where not all processes met."""
        place = self._place
        return (
            f"process {place.index} of {place.count} did not meet all the others through the first one at "
            f"{place.address} in {self._wait:.0f} s: is each of them started, once, with this address and this number "
            "of processes?"
        )

    def _end(self, code: int, text: str) -> None:
        """Ends this process, unless it is ending already and has its own reason."""
        if self._ending.acquire(blocking=False):
            _exit(code, f"error: {text}; this process ends too")

    def _name(self, index: int) -> str:
        return f"process {index} ({index + 1} of {self._place.count}, on {self._hosts[index]})"


def _check_address(place: Place, wait: float) -> None:
    """Raises `InputError` if the first process cannot listen at its port, or is not reached there by another one."""
    if place.index == 0:
        try:
            with socket.create_server(("", place.port)):
                return
        except OSError as error:
            raise InputError(f"cannot listen at port {place.port} for the other processes: {error}") from None
    end = time.monotonic() + wait
    while True:
        try:
            with socket.create_connection((place.host, place.port), timeout=max(1.0, end - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() >= end:
                raise InputError(
                    f"process {place.index} of {place.count} could not reach the first one at {place.address} in "
                    f"{wait:.0f} s ({error}): is it started, and is this its address?"
                ) from None
        time.sleep(min(1.0, wait / 10))


@contextlib.contextmanager
def _calling_when_lost(lost: Any) -> Iterator[None]:
    """Lets the client of JAX that is made in the block call `lost` where it would abort the process.

    That call has an argument of a C++ type that Python does not have, and therefore ends in `std::terminate`, which is
    made to call `lost`, too.
    """
    make = _jax.get_distributed_runtime_client
    with contextlib.suppress(OSError, AttributeError):  # another C++ library: its own message ends the process
        _kept.append(ctypes.CFUNCTYPE(None)(lost))
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(_kept[-1])
    _jax.get_distributed_runtime_client = lambda *given, **named: make(*given, **named, missed_heartbeat_callback=lost)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make


_kept: list[Any] = []  # C++ holds their addresses


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppresses C++ messages on standard error about the way in which the service is used."""
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    global _standard_error
    _standard_error = own
    try:
        yield
    finally:
        os.dup2(own, 2)
        _standard_error = 2
        os.close(own)
        os.close(nowhere)


_standard_error = 2


def _exit(code: int, message: str) -> NoReturn:
    # The main thread may be in the middle of a line, or wait for ever in a collective: it is not asked.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(_standard_error, f"moe-jax: {message}\n".encode())
    os._exit(code)
