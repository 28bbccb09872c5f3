"""Runs commands in processes forked from this one; see `interrupted`.

python -m tests.attack.forked    requests and answers are lines of JSON on standard input and output
"""

import contextlib
import dataclasses
import importlib
import json
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

SECONDS = 300  # after which a command hangs


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended: exit code (of a kill, minus its signal), seconds, and what it printed as errors."""

    code: int
    seconds: float
    errors: str


def run(
    commands: Sequence[Sequence[str]],
    *,
    kill_after: float | None = None,
    hide_full_disk: bool = False,
    cache: str | None = None,
) -> list[Ended]:
    """Runs commands at the same time.

    Args:
      commands: arguments of `moe-jax`.
      kill_after: seconds after which they get SIGKILL; None: a hang is ended after minutes.
      hide_full_disk: the disk seems large at first, as if others filled it meanwhile.
      cache: folder of compiled programs; None: that of the environment.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(len(commands))]
        running = {
            _fork(arguments, file, hide_full_disk=hide_full_disk, cache=cache): number
            for number, (arguments, file) in enumerate(zip(commands, files, strict=True))
        }
        ended: dict[int, Ended] = {}
        deadline = start + (SECONDS if kill_after is None else kill_after)
        while running:
            if time.monotonic() > deadline:
                for process in running:
                    os.kill(process, signal.SIGKILL)
                deadline = float("inf")
            for process in list(running):
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    number = running.pop(process)
                    code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - start
                    ended[number] = Ended(code, seconds, files[number].read_text(errors="replace"))
            time.sleep(0.002)
    return [ended[number] for number in range(len(commands))]


def _fork(arguments: Sequence[str], errors: Path, *, hide_full_disk: bool, cache: str | None) -> int:
    errors.touch()  # it may be killed before it has opened it
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        descriptor = os.open(errors, os.O_WRONLY)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(descriptor, 2)
        code = _command(arguments, hide_full_disk=hide_full_disk, cache=cache)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        # As at the end of a program; not all that is done there, for this would remove the folder of `run`.
        multiprocessing.util._exit_function()
        sys.stderr.flush()
    os._exit(code)


def _command(arguments: Sequence[str], *, hide_full_disk: bool, cache: str | None) -> int:
    import shutil

    import jax

    from moe_jax.commands import cli

    if hide_full_disk:
        usage = shutil.disk_usage("/")
        shutil.disk_usage = lambda path: usage._replace(free=1 << 60)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", cache)
    return cli.main(list(arguments))


def main() -> NoReturn:
    from moe_jax.commands import cli

    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    work = ("api.train", "conversion", "upcycling", "compression", "peft.adapt", "peft.merge")
    work += ("training.training_run",)
    for module in (*work, *(f"commands.{command}" for command in cli.COMMANDS)):
        importlib.import_module(f"moe_jax.{module}")
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        ended = run(request.pop("commands"), **request)
        answers.write(json.dumps([dataclasses.asdict(one) for one in ended]) + "\n")
        answers.flush()
    raise SystemExit


if __name__ == "__main__":
    main()
