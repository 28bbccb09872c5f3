"""Processes that begin with the library imported: forked from one that has imported it, once for all tests of a worker.

A process of its own spends more time on importing JAX, Flax and Orbax than most tests spend on what they are about.

    python -m tests.support.forked FD      # what they are forked from; requests come through a socket
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from moe_jax.commands.environment import TUNABLE, TUNABLES
from tests.support.environment import ROOT

OF_COORDINATION = ("moe_jax.distributed.coordination", "moe_jax.distributed.processes")
OF_MODELS = ("moe_jax.model_io.model_dir", "moe_jax.checkpoints.orbax_store", "moe_jax.model_io.loading")
OF_COMMANDS = (
    "tensorboardX",
    "moe_jax.api.train",
    "moe_jax.api.compress",
    "moe_jax.api.measure",
    "moe_jax.commands.cli",
)

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, of Linux
_MOST_BYTES = 200_000


class _Server:
    """The process that others are forked from."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, stdin=subprocess.DEVNULL)
        atexit.register(self.end)

    def end(self) -> None:
        self.socket.close()
        self.process.wait()

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The number of a new process, which is a child of this one."""
        libc = ctypes.CDLL(None)
        # The process in between ends at once: those that it leaves are given to the nearest who takes them in.
        libc.prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.socket, [json.dumps(request).encode()], streams)
            return int(self.socket.recv(100))
        finally:
            libc.prctl(_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _server() -> _Server:
    return _Server()


class Forked(subprocess.Popen):
    """A process as of `subprocess.Popen`, whose command is `[sys.executable, "-m" or "-c", ...]`."""

    imports: Sequence[str]

    def __init__(self, command: Sequence[str], *, imports: Sequence[str], **options: Any):
        self.imports = imports
        super().__init__(command, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        request = {"command": args[1:], "cwd": str(cwd or os.getcwd()), "env": dict(env), "imports": self.imports}
        given = [rest[3], rest[6], rest[8]]  # what the process reads, and writes to
        self.pid = _server().fork(request, [own if end == -1 else end for own, end in enumerate(given)])
        self._child_created = True
        for end in {*given} - {-1}:
            os.close(end)


def start(command: Sequence[str], *, imports: Sequence[str], env: Mapping[str, str], **options: Any):
    """A process like that of `subprocess.Popen`, forked where it begins as one that is started would.

    JAX reads its variables when it is imported.
    """
    changed = {name for name in os.environ.keys() | env.keys() if os.environ.get(name) != env.get(name)}
    is_the_same = not any(name.startswith("JAX_") or name == "PYTHONHASHSEED" for name in changed)
    if sys.platform == "linux" and is_the_same and env.get("PYTHONPATH") == str(ROOT):
        return Forked(command, imports=imports, env=env, **options)
    return subprocess.Popen(command, env=env, **options)


def _serve(number: int) -> dict[str, Any]:
    """Forks as it is asked to; returns in every process that was forked, with what it is to do."""
    requests = socket.socket(fileno=number)
    while True:
        message, streams, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        before = len(sys.modules)
        for module in request["imports"]:
            importlib.import_module(module)
        if len(sys.modules) > before:
            gc.collect()
            gc.freeze()
        number_read, number_written = os.pipe()
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            requests.send(os.read(number_read, 100))
            for end in (number_read, number_written, *streams):
                os.close(end)
            continue
        if child := os.fork():
            os.write(number_written, str(child).encode())
            os._exit(0)
        for end in (number_read, number_written):
            os.close(end)
        requests.close()
        for own, stream in enumerate(streams):
            os.dup2(stream, own)
            os.close(stream)
        return request


def _become(command: Sequence[str], cwd: str, env: Mapping[str, str]) -> None:
    """Does in this process what the interpreter does with a command line."""
    os.chdir(cwd)
    os.environ.clear()
    # As a command that was started anew with huge pages, or without.
    os.environ.update({TUNABLES: f"{TUNABLE}=0"} | dict(env))
    kind, what, *arguments = command
    sys.argv = ["-c" if kind == "-c" else what, *arguments]
    sys.orig_argv = [sys.executable, *command]
    sys.path[0] = "" if kind == "-c" else cwd
    if kind == "-m":
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    request = _serve(int(sys.argv[1]))
    _become(request["command"], request["cwd"], request["env"])
