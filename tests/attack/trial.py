"""Tries inputs, in processes whose processor time, memory and files are watched."""

import dataclasses
import functools
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moe_jax.core import template_sandbox
from moe_jax.core.errors import InputError
from tests.attack.attacks import CLASSES, Attack, all_attacks, canary

# What no input may do, in the order in which the worst comes first.
FAULTS = ("executed", "escape", "wrong", "hang", "memory", "traceback", "echo")
FINE = ("refused", "accepted")

MAX_WAITING = 40.0  # seconds by the clock in which no processor time is used
MAX_MESSAGE = 8000  # characters of a refusal: forty problems and what stands before them
MAX_LINE = 1000
_ADDRESS_SPACE = 3 << 30  # above what the process had; the machine is to survive what the reader does not
_PER_PROCESS = 2000
ROOT = Path(__file__).resolve().parents[2]

_RUNS = {
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn",
    "socket.connect", "webbrowser.open",
}  # fmt: skip
# Which argument of an event is the path that is changed, and which the descriptor of the folder that it is relative to.
_CHANGES = {
    "os.mkdir": (0, 2), "os.remove": (0, 1), "os.rmdir": (0, 1), "os.truncate": (0, None), "os.chmod": (0, 2),
    "os.rename": (1, 3), "os.link": (1, 3), "os.symlink": (1, 2), "shutil.rmtree": (0, 1),
}  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one input.

    Attributes:
      number: of the input.
      verdict: one of `FAULTS` or `FINE`.
      detail: what the reader said, or how it failed.
      seconds: processor time of the reader and of what it has work besides.
      bytes: of memory that they took at most.
    """

    number: int
    verdict: str
    detail: str
    seconds: float = 0.0
    bytes: int = 0


def try_inputs(
    name: str, numbers: Sequence[int], package: str = CLASSES, max_seconds: float | None = None
) -> Iterator[Outcome]:
    """Tries inputs of a class, one after another; a process that is ended or has tried many is replaced.

    Args:
      name: of the attack.
      numbers: of the inputs.
      package: whose modules hold the attacks.
      max_seconds: of processor time; a reader that takes more hangs. None: what the attack says.

    Yields:
      One outcome for each number, in order.
    """
    processes = _server()
    max_seconds = all_attacks(package)[name].max_seconds if max_seconds is None else max_seconds
    position = 0
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as scratch:
        while position < len(numbers):
            ours, theirs = processes.Pipe()
            part = list(numbers[position : position + _PER_PROCESS])
            worker = processes.Process(
                target=_work, args=(theirs, package, name, part, scratch, max_seconds), daemon=True
            )
            worker.start()
            theirs.close()
            try:
                for outcome in _watch(ours, worker.pid or 0, part, max_seconds):
                    yield outcome
                    position += 1
            finally:
                worker.kill()
                worker.join()


@functools.cache
def _server() -> Any:
    """Starts the process that all others are copies of: it has imported everything and done nothing."""
    all_attacks()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__, *(module for module in sys.modules if module.startswith(CLASSES))])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.update({} if before is None else {"PYTHONPATH": before})
        if before is None:
            del os.environ["PYTHONPATH"]
    return processes


def _watch(connection: Connection, process: int, numbers: Sequence[int], max_seconds: float) -> Iterator[Outcome]:
    """Receives outcomes from a process until it is done, ends, or has to be ended."""
    for number in numbers:
        # Making the original takes its time, and so may making an input; only reading is watched.
        began = _expect(connection, None)
        if not isinstance(began, float):
            raise RuntimeError(f"input {number} could not be made: {began}")
        outcome = _expect(connection, (process, began + max_seconds + 0.5))
        if outcome is None:
            yield Outcome(number, "hang", "did not end", _processor_seconds(process) - began)
            return
        if not isinstance(outcome, Outcome):
            yield Outcome(number, "traceback", "the process died")
            return
        yield outcome
        if outcome.verdict == "memory":
            return


def _expect(connection: Connection, limits: tuple[int, float] | None) -> Any:
    """The next message; None if it does not come in time, and a word if the process has ended."""
    start, seen = time.monotonic(), 0.0
    while not connection.poll(0.2 if limits else 600):
        if limits is None:
            return "it took more than ten minutes"
        process, latest = limits
        spent = _processor_seconds(process)
        if spent > seen + 0.1:  # it works, however busy the machine is
            start, seen = time.monotonic(), spent
        if spent > latest or time.monotonic() - start > MAX_WAITING:
            return None
    try:
        return connection.recv()
    except EOFError:
        return "the process died"


def _processor_seconds(process: int) -> float:
    """Processor time of a process and its threads, which `time.process_time` gives inside it."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- inside the process ---------------------------------------------------------------------------


def _work(
    connection: Connection, package: str, name: str, numbers: Sequence[int], scratch: str, max_seconds: float
) -> None:
    """Tries inputs and sends, for each, the processor time at which reading began, and the outcome."""
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # libraries that print; what a reader says is in its error
    os.dup2(null, 2)
    attack = all_attacks(package)[name]
    room = Path(tempfile.mkdtemp(dir=scratch))
    os.chdir(room)
    files = _FileWatch()
    sys.addaudithook(files.hook)
    try:
        original = attack.original()
        _prepare_reader()
    except BaseException:
        connection.send(traceback.format_exc())
        return
    for number in numbers:
        folder, out = room / "in", room / "out"
        for path in (folder, out):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        canary(folder).unlink(missing_ok=True)
        try:
            attack.make(random.Random(f"{name} {number}"), original, folder)
        except BaseException:
            connection.send(traceback.format_exc())
            return
        base = _reset_peak()
        began, began_besides = time.process_time(), attack.besides()[0]
        connection.send(began)
        files.allowed = str(out)
        verdict, detail, read = _read(attack, folder, out)
        files.allowed = None
        seconds, peak = time.process_time() - began, max(0, _peak() - base)
        besides = attack.besides()
        seconds, peak = seconds + besides[0] - began_besides, peak + besides[1]
        if verdict == "accepted":
            try:
                wrong = attack.wrong(original, folder, read)
            except BaseException:
                wrong = f"the judge failed: {traceback.format_exc()}"
            verdict, detail = ("wrong", wrong) if wrong else (verdict, detail)
        read = None
        if peak > attack.max_bytes:
            verdict, detail = "memory", f"{peak / 1e6:.0f} MB: {detail}"
        elif seconds > max_seconds:
            verdict, detail = "hang", f"{seconds:.1f} s: {detail}"
        if files.escapes:
            verdict, detail = "escape", ", ".join(files.escapes)
        if files.runs or canary(folder).exists():
            verdict, detail = "executed", ", ".join(files.runs) or "a payload"
        files.escapes, files.runs = [], []
        connection.send(Outcome(number, verdict, detail[:2000], seconds, peak))


def _read(attack: Attack, folder: Path, out: Path) -> tuple[str, str, Any]:
    """A verdict on how the reader ended, what it said, and what it read."""
    try:
        return "accepted", "", attack.read(folder, out)
    except (InputError, OSError) as error:
        said = str(error)
        longest = max(map(len, said.splitlines()), default=0)
        if len(said) > MAX_MESSAGE or longest > MAX_LINE:
            return "echo", f"{len(said)} characters, the longest line {longest}: {said[:200]}", None
        return "refused", said, None
    except MemoryError:
        return "memory", f"more than {_ADDRESS_SPACE >> 30} GB", None
    except BaseException as error:  # whatever it is, it is what the attack looks for
        where = traceback.extract_tb(error.__traceback__)[-4:]
        steps = " < ".join(f"{Path(step.filename).name}:{step.lineno} {step.name}" for step in reversed(where))
        return "traceback", f"{type(error).__name__}: {str(error)[:200]} at {steps}", None


def _prepare_reader() -> None:
    """Nothing is compiled into a folder outside, and no reader can take the whole machine."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.devnull  # so that commands make no folder for it
    compilation_cache.reset_cache()  # the original may have used it
    # What JAX needs to trace a model is no part of what an input costs.
    jax.eval_shape(lambda x: x, jax.ShapeDtypeStruct((1,), "float32"))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESS_SPACE, resource.RLIM_INFINITY))


class _FileWatch:
    """Notes what Python is asked to run or to change outside of one folder.

    Attributes:
      allowed: the folder in which a reader may write; None: nothing is watched.
      escapes: paths outside of it that were written.
      runs: programs and connections.
    """

    def __init__(self) -> None:
        self.allowed: str | None = None
        self.escapes: list[str] = []
        self.runs: list[str] = []

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """For `sys.addaudithook`."""
        if self.allowed is None:
            return
        if event in _RUNS:
            if event == "subprocess.Popen" and list(arguments[1])[1:] == ["-P", str(template_sandbox._PROGRAM)]:
                return  # ours, in which templates are rendered
            self.runs.append(f"{event} {str(arguments)[:100]}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            self._changed(arguments[0])
        elif event in _CHANGES:
            path, folder = _CHANGES[event]
            self._changed(arguments[path], None if folder is None else arguments[folder])

    def _changed(self, path: Any, folder: int | None = None) -> None:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str | os.PathLike) or os.fspath(path) == os.devnull:
            return  # a descriptor, which was opened before
        if folder is not None and folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        allowed, watching = self.allowed, os.path.realpath(path)
        if allowed is None or os.path.commonpath([os.path.realpath(allowed), watching]) != os.path.realpath(allowed):
            self.escapes.append(watching)


def _reset_peak() -> int:
    """Makes the peak of memory begin here; returns the bytes that are resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The most bytes that were resident since `_reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
