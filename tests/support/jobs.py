"""Commands in two processes on this machine, which reach each other as the hosts of a pod do."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.environment import COMPILER_FLAGS, ROOT
from tests.support.forked import OF_COMMANDS, start


class Job:
    """Processes of one command."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        processes: int,
        devices: int,
        second: Mapping[str, Any],
        program: Sequence[str],
        changed: Mapping[str, str],
    ):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        flags = f"{COMPILER_FLAGS} --xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | changed
        self.processes = [
            start(
                [sys.executable, *program, *how.get("arguments", arguments)],
                imports=OF_COMMANDS,
                cwd=how.get("folder", folder),
                env=environment
                | {"MOE_JAX_DISTRIBUTED": f"localhost:{port},{processes},{index}"}
                | {"PYTHONPATH": how.get("PYTHONPATH", str(ROOT))},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, how in enumerate([{}, second][:processes])
        ]

    def until(self, seen: Callable[[], object]) -> None:
        """Returns as soon as something is seen, or a process has ended."""
        deadline = time.monotonic() + 300
        while not seen() and time.monotonic() < deadline and all(p.poll() is None for p in self.processes):
            time.sleep(0.001)

    def ended(self) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each."""
        said = [process.communicate(timeout=300) for process in self.processes]
        return [(process.returncode, *texts) for process, texts in zip(self.processes, said, strict=True)]


@contextlib.contextmanager
def job(
    folder: Path,
    *arguments: str,
    processes: int = 2,
    devices: int = 1,
    second: Mapping[str, Any] | None = None,
    program: Sequence[str] = ("-m", "moe_jax.commands.cli"),
    **changed: str,
) -> Iterator[Job]:
    """Starts a command; `second` says what the second process is given instead."""
    how: dict[str, Any] = {"second": second or {}, "program": program, "changed": changed}
    started = Job(folder, arguments, processes=processes, devices=devices, **how)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.wait()


def run(folder: Path, *arguments: str, **how) -> list[str]:
    """Runs a command that must go well; returns the output of every process."""
    with job(folder, *arguments, **how) as started:
        ended = started.ended()
    assert all(code == 0 for code, _, _ in ended), ended
    return [out for _, out, _ in ended]
