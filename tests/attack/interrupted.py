"""Commands that are killed, that find a full disk, or that are given twice at a time; and what became of their results.

Every command runs in a process of its own, forked from one that has imported the library but done nothing yet: a kill
then falls into the command's work and not into seconds of imports.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.attack.forked import Ended
from tests.support.disks import content_of
from tests.support.environment import COMPILER_FLAGS, ROOT

PAGE = 4096
ENOUGH = 256 << 20
OUT = "disk/out"
RECIPE = f"""
run_dir = "{OUT}"
[model]
path = "dense"
[data]
seq_len = 64
[[data.sources]]
path = "text.txt"
[optimizer]
learning_rate = 1e-3
[schedule]
warmup_steps = 2
[train]
steps = 24
batch_size = 2
[checkpoint]
every = 6
"""

MOE = ("--experts", "4", "--top-k", "2")
LORA = ("--method", "lora", "--adapter", "lora:4", "--targets", "q,v,up")
COMMANDS: Mapping[str, Sequence[str]] = {
    "convert": ("convert", "foreign", OUT),
    "upcycle": ("upcycle", "dense", OUT, *MOE, "--delta", "low-rank:4"),
    "adapt": ("adapt", "dense", OUT, *LORA),
    "merge": ("merge", "adapter", OUT),
    "compress": ("compress", "moe", OUT, "--method", "resmoe", "--keep", "0.5"),
    "export": ("export", "dense", OUT, "--max-shard-size", "200kB"),
    "export of RUN@STEP": ("export", "before@12", OUT, "--max-shard-size", "200kB"),
    "train": ("train", "recipe.toml", "--resume"),
    "restart": ("train", "recipe.toml", "--restart", "before@12", "--skip-batches", "1", "--resume"),
    "data tokenize": ("data", "tokenize", "tokens.toml", OUT, "--processes", "2"),
}
RUNS = frozenset({"train", "restart"})  # their target is there before it is complete
COMPILING = frozenset({"upcycle", "adapt", "compress"})  # and they are given their target as an argument
# What makes what they are given, by its name; all others are made of the first.
BEFORE: Mapping[str, Sequence[str]] = {
    "dense": ("convert", "foreign", "dense"),
    "moe": ("upcycle", "dense", "moe", *MOE, "--delta", "full"),
    "adapter": ("adapt", "dense", "adapter", *LORA),
    "before": ("train", "recipe.toml", "--set", "run_dir=before", "train.steps=12", "schedule.steps=24"),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of a command that was disturbed.

    Attributes:
      kills: how often it was killed.
      went_on: whether it found work of the one before.
      fault: what is wrong; None: the result is bit for bit that of an undisturbed command, and nothing else is there.
    """

    kills: int
    went_on: bool
    fault: str | None


class Workshop:
    """A folder with small models, in which commands are run. A context manager."""

    def __init__(self, folder: Path, data: Path):
        """Makes the folder.

        Args:
          folder: must not exist.
          data: folder of real weights and texts.
        """
        self._folder = folder.absolute()
        self._disk = self._folder / OUT.split("/")[0]
        self._out = self._folder / OUT
        self._disk.mkdir(parents=True)
        (self._folder / "foreign").symlink_to((data / "weights" / "stories260K" / "hf").resolve())
        text = data / "text" / "tinystories" / "tinystories_sample_2MiB.txt"
        (self._folder / "text.txt").write_bytes(text.read_bytes()[:60_000])
        (self._folder / "recipe.toml").write_text(RECIPE)
        (self._folder / "tokens.toml").write_text(RECIPE + 3 * '[[data.sources]]\npath = "text.txt"\n')
        self._expected: dict[str, dict[str, object]] = {}
        self._seconds: dict[str, float] = {}
        self._sizes: dict[str, int] = {}

    def __enter__(self) -> Self:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {COMPILER_FLAGS}",
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self._folder / "compiled")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self._folder,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()

    def kill(self, name: str, draws: random.Random, *, kills: int) -> Trial:
        """Kills a command at random times, up to so often, and gives it again until it is done."""
        self._know(name)
        self._clear()
        killed, went_on = 0, False
        while True:
            left = killed < kills
            after = draws.uniform(0, self._seconds[name]) if left else None
            (ended,) = self._run([COMMANDS[name]], kill_after=after)
            if ended.code != -signal.SIGKILL:
                return Trial(killed, went_on, self._fault(name, ended))
            killed += 1
            went_on = went_on or any(self._disk.iterdir())
            if self._out.exists() and name not in RUNS:  # it was killed between the rename and its end
                return Trial(killed, went_on, self._fault(name, dataclasses.replace(ended, code=0)))

    def fill_disk(self, name: str, share: float) -> Trial:
        """Gives a command a disk that is full after a share of its result, and once more when there is room.

        The first one must end with one line and exit code 2, and leave nothing that looks whole.
        """
        self._know(name)
        self._clear()
        with _mounted(self._disk, max(PAGE, int(self._sizes[name] * share))) as grow:
            (ended,) = self._run([COMMANDS[name]], hide_full_disk=True)
            faults = [] if _is_one_line(ended, "") else [f"exit code {ended.code}: {ended.errors[-400:]}"]
            if self._out.exists() and (name not in RUNS or (self._out / "model").exists()):
                faults.append("a half result looks whole")
            went_on = any(self._disk.iterdir())
            grow()
            (ended,) = self._run([COMMANDS[name]], hide_full_disk=True)
            fault = self._fault(name, ended)
        return Trial(0, went_on, "; ".join([*faults, *([fault] if fault else [])]) or None)

    def twice(self, name: str) -> Trial:
        """Gives a command twice at the same time: one does the work, the other says who does."""
        self._know(name)
        self._clear()
        both = sorted(self._run([COMMANDS[name]] * 2), key=lambda ended: ended.code)
        says = ("another command is writing", "is in use by", "already exists")
        if not any(_is_one_line(both[1], word) for word in says):
            return Trial(0, False, f"exit codes {[one.code for one in both]}: {both[1].errors[-400:]}")
        return Trial(0, False, self._fault(name, both[0]))

    def share_cache(self, name: str) -> Trial:
        """Gives a command of `COMPILING` twice, with two targets and one empty cache of compiled programs."""
        self._know(name)
        self._clear()
        other = self._disk / "other"
        commands = [COMMANDS[name], [word.replace(OUT, "disk/other") for word in COMMANDS[name]]]
        cache = self._folder / "cache"
        ended = self._run(commands, cache=str(cache))
        shutil.rmtree(cache)
        fault = next((f"exit code {one.code}: {one.errors[-400:]}" for one in ended if one.code), None)
        fault = fault or self._differing(self._result(other), self._expected[name])
        shutil.rmtree(other, ignore_errors=True)
        return Trial(0, False, fault or self._fault(name, ended[0]))

    def _run(self, commands: Sequence[Sequence[str]], **options: Any) -> list[Ended]:
        """Runs commands at the same time; see `forked.run`."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(json.dumps({"commands": commands, **options}) + "\n")
        self._parent.stdin.flush()
        return [Ended(**ended) for ended in json.loads(self._parent.stdout.readline())]

    def _know(self, name: str) -> None:
        """Runs a command undisturbed, twice so that all is compiled: what must come out, and how long it takes."""
        if name in self._expected:
            return
        given = {word.split("@")[0] for word in COMMANDS[name]} | {"dense"}
        for made, arguments in BEFORE.items():
            if made in given and not (self._folder / made).exists():
                (ended,) = self._run([arguments])
                assert ended.code == 0, ended.errors
        for _ in range(2):
            self._clear()
            (ended,) = self._run([COMMANDS[name]])
            assert ended.code == 0, ended.errors
        self._expected[name], self._seconds[name] = self._result(self._out), ended.seconds
        sizes = (-(-file.stat().st_size // PAGE) * PAGE for file in self._out.rglob("*") if file.is_file())
        self._sizes[name] = sum(sizes)

    def _result(self, out: Path) -> dict[str, object]:
        """What is the same every time."""
        if not (out / "recipe.toml").is_file():
            return content_of(out)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [{key: value for key, value in line.items() if "second" not in key} for line in lines]
        return {**content_of(out / "model"), "metrics.jsonl": steps}

    def _fault(self, name: str, ended: Ended) -> str | None:
        """What is wrong after the last command of a trial."""
        if ended.code != 0:
            return f"exit code {ended.code}: {ended.errors[-400:]}"
        left = [str(path) for path in (*self._disk.glob("*"), *self._out.glob(".*")) if path != self._out]
        left += self._left_processes()
        return f"left over: {left}" if left else self._differing(self._result(self._out), self._expected[name])

    def _left_processes(self, seconds: float = 20.0) -> list[str]:
        """The processes that commands have started in the folder, if they do not end within so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := _processes_in(self._folder) - {self._parent.pid}) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [f"process {number}" for number in sorted(left)]

    def _differing(self, result: Mapping[str, object], expected: Mapping[str, object]) -> str | None:
        differ = sorted(key for key in result.keys() | expected.keys() if result.get(key) != expected.get(key))
        return f"{len(differ)} files differ, the first is {differ[0]}" if differ else None

    def _clear(self) -> None:
        for path in self._disk.iterdir():
            shutil.rmtree(path)


def _processes_in(folder: Path) -> set[int]:
    """The processes that work in a folder."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if (process / "cwd").resolve(strict=True) == folder:
                found.add(int(process.name))
    return found


def _is_one_line(ended: Ended, word: str) -> bool:
    """Whether a command refused as it should."""
    lines = ended.errors.rstrip().splitlines()
    return ended.code == 2 and "Traceback" not in ended.errors and lines[-1].startswith("moe-jax: error: ") and (
        word in lines[-1]
    )  # fmt: skip


@contextlib.contextmanager
def _mounted(folder: Path, size: int) -> Iterator[Any]:
    """Puts a file system of so many bytes on an empty folder, and yields a function that makes it large.

    Raises:
      PermissionError: where mounting is not permitted.
    """
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        raise PermissionError("mounting a small disk takes the rights of root")
    try:
        yield lambda: subprocess.run(["mount", "-o", f"remount,size={ENOUGH}", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
