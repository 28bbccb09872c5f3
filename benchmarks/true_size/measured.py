"""Runs of commands in processes of their own: their time, and the greatest memory that they had."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple


class Measured(NamedTuple):
    """What is known of a command; of several processes that ran it together, the sums, but for seconds.

    Attributes:
      seconds: from its start to its end.
      processor: seconds of all threads on the processor.
      memory: greatest resident memory, bytes.
      printed: its standard output; that of the first process.
    """

    seconds: float
    processor: float
    memory: int
    printed: str


def run_command(*arguments: str | Path, processes: int = 1) -> Measured:
    """Runs `moe-jax` with arguments. Raises `SystemExit` if it fails."""
    return run_program("-m", "moe_jax.commands.cli", *arguments, processes=processes)


def run_program(*arguments: str | Path, processes: int = 1) -> Measured:
    """Runs Python with arguments, in several processes that are told of each other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    started = []
    for index in range(processes):
        joined = {"MOE_JAX_DISTRIBUTED": f"localhost:{port},{processes},{index}"} if processes > 1 else {}
        command = [sys.executable, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | joined))
    seen = [_Watched(process.pid) for process in started]
    printed = [""] * processes

    def read(index: int) -> None:
        output = started[index].stdout
        assert output is not None
        printed[index] = output.read()

    readers = [threading.Thread(target=read, args=(index,)) for index in range(processes)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        for one in seen:
            one.look()
        time.sleep(0.2)
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(next(filter(None, codes)))
    processor, memory = (sum(getattr(one, name) for one in seen) for name in ("processor", "memory"))
    return Measured(time.monotonic() - began, processor, memory, printed[0])


class _Watched:
    """The time and the memory of a process, as they were when it was looked at last."""

    def __init__(self, pid: int):
        self.processor, self.memory = 0.0, 0
        self._folder = Path(f"/proc/{pid}")

    def look(self) -> None:
        try:
            status, stat = ((self._folder / name).read_text() for name in ("status", "stat"))
        except OSError:  # it has ended
            return
        for line in status.splitlines():
            if line.startswith("VmHWM"):
                self.memory = int(line.split()[1]) * 1024
        user, system = stat.rpartition(")")[2].split()[11:13]
        self.processor = max(self.processor, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"))
