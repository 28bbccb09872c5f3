"""Plants small bugs, one at a time, and says which of them the tests find.

    python -m tests.tooling.mutate --map                      # once: which test runs which line (needs `coverage`)
    python -m tests.tooling.mutate --limit 200 --jobs 2       # plant 200 by rules, and those written down by hand
    python -m tests.tooling.mutate --only moe_jax/functional/codes.py --limit 30
    python -m tests.tooling.mutate --again survived,timeout --budget 600

The checkout is never changed: every job has a copy of it in `.pytest_cache/mutation`, where the results are kept too. A
run that was interrupted goes on where it stopped; `--fresh` forgets the results. For each bug the tests that run its
lines are run up to the first that fails, the nearest first, for at most `--budget` seconds of what they take
without it. A bug is then

    killed          a test failed, or the modules could no longer be imported
    survived        none did
    timeout         the tests took over three times as long as without it, plus a minute
    equivalent      it survived, and `equivalent_mutants.toml` says why no test could tell

A bug of `semantic_mutants.toml` whose text is not found exactly once is reported as not applicable.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tooling import covering, mutants

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".pytest_cache" / "mutation"
TARGETS = ("moe_jax/**/*.py",)
# Imported before a process is forked for each bug; nothing of this project, and nothing that starts threads.
PREPARED = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "hypothesis", "scipy.stats", "safetensors", "tokenizers")
SURVIVED, KILLED, TIMEOUT, EQUIVALENT = "survived", "killed", "timeout", "equivalent"


def copy_of_checkout(folder: Path) -> Path:
    """The files that git knows or would add, as they are now; only what has changed is written."""
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    for old in [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]:
        if str(old.relative_to(folder)) not in names:
            old.unlink()
    for name in sorted(names):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            if not target.is_symlink():
                target.symlink_to(os.readlink(source))
        elif not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copy(source, target)
    return folder


class Chosen:
    """A pytest plugin: runs the given tests in the given order, and writes down the first that fails."""

    def __init__(self, names: list[str], output: Path):
        self.order, self.output = {name: index for index, name in enumerate(names)}, output

    def pytest_configure(self):
        import hypothesis

        # One failing example is enough, however large.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutation", derandomize=True, deadline=None, database=None, phases=phases, report_multiple_bugs=False
        )
        hypothesis.settings.load_profile("mutation")

    # After `one_in` has counted the cases of every test: of those that are left, it would leave most out.
    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items):
        yield
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.output.write_text(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.output.write_text(f"{report.nodeid} (import)")


def start(folder: Path, files: list[str], seconds: float | None, plugin: Callable[[], object]) -> int:
    """Forks a process that runs test files of a copy of the checkout; its exit code is pytest's.

    It is ended after so many seconds of processor time. The pytest plugin is made within it.
    """
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        if seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (round(seconds), round(seconds) + 5))
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)  # what the tests start as processes of their own imports the copy too
        for name in [name for name in sys.modules if name.split(".")[0] in ("moe_jax", "tests")]:
            del sys.modules[name]
        sys.path[:] = [str(folder)] + [path for path in sys.path if path not in ("", str(ROOT))]
        sys.path_importer_cache.clear()
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short", *files]
        code = pytest.main(arguments, plugins=[plugin()])
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
        code = pytest.ExitCode.INTERNAL_ERROR
    os._exit(int(code))


def wait(running: dict[int, float]) -> tuple[int, int | None]:
    """The first process that ends, and its exit code: None if a limit ended it. `running` has when to end each."""
    while True:
        for process, deadline in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                ended, status = os.waitpid(process, 0)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return process, None if -code in (signal.SIGXCPU, signal.SIGKILL) else code
        time.sleep(0.05)


def measure(only: str | None, jobs: int) -> None:
    """Writes what the tests of each file run to `WORK/map`, where it is not there yet."""
    (WORK / "map").mkdir(parents=True, exist_ok=True)
    queue = []
    # What takes long is started first: as a guess, what is long.
    for file in sorted(ROOT.glob("tests/**/test_*.py"), key=lambda file: -file.stat().st_size):
        name = str(file.relative_to(ROOT))
        output = WORK / "map" / (name.replace("/", ".") + ".json")
        if not output.exists() and (not only or only in name):
            queue.append((name, output))
    idle = [copy_of_checkout(WORK / f"tree{job}") for job in range(jobs)]
    running, deadlines = {}, {}
    while queue or running:
        while queue and idle:
            (name, output), copy = queue.pop(0), idle.pop()
            recorder = functools.partial(covering.Recorder, copy, output)
            process = start(copy, [name, "--maxfail=1000"], None, recorder)
            running[process], deadlines[process] = (name, copy, time.monotonic()), time.monotonic() + 3600
        process, code = wait(deadlines)
        del deadlines[process]
        name, copy, begin = running.pop(process)
        idle.append(copy)
        print(f"{name}: {time.monotonic() - begin:.0f} s, exit code {code}", flush=True)


def run(
    chosen: list[mutants.Mutant], known: covering.Coverage, results: dict[str, dict], args: argparse.Namespace
) -> None:
    """Plants each bug in turn; adds to `results`, and to the file of them, as soon as something is known."""
    idle = [copy_of_checkout(WORK / f"tree{job}") for job in range(args.jobs)]
    queue, running, deadlines = collections.deque(chosen), {}, {}
    try:
        while queue or running:
            while queue and idle:
                mutant = queue.popleft()
                tests = mutant.readers + known.tests(mutant.path, mutant.source, mutant.lines, args.budget)
                folder, expected = idle.pop(), sum(known.seconds.get(name, 1) for name in tests)
                plant(folder, mutant.path, mutant.mutated)
                found = folder.with_suffix(".failed")
                found.unlink(missing_ok=True)
                files = list(dict.fromkeys(name.split("::")[0] for name in tests))
                seconds = 60 + 3 * expected
                process = start(folder, files, seconds, functools.partial(Chosen, tests, found))
                running[process] = (mutant, folder, tests, time.monotonic())
                deadlines[process] = time.monotonic() + 8 * seconds
            process, code = wait(deadlines)
            mutant, folder, tests, begin = running.pop(process)
            del deadlines[process]
            plant(folder, mutant.path, mutant.source)
            idle.append(folder)
            found = folder.with_suffix(".failed")
            verdict = {0: SURVIVED, 5: SURVIVED, None: TIMEOUT}.get(code, KILLED)
            record = {
                "verdict": verdict,
                "path": mutant.path,
                "line": mutant.lines[0],
                "rule": mutant.rule,
                "what": mutant.description,
                "change": mutant.change,
                "by": found.read_text() if verdict == KILLED and found.exists() else None,
                "exit_code": code,
                "tests": len(tests),
                "seconds": round(time.monotonic() - begin, 1),
            }
            results[mutant.identity] = record
            write(results)
            print(f"{len(queue) + len(running):4d} left  {line_of(record)}", flush=True)
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        for mutant, folder, *_ in running.values():
            plant(folder, mutant.path, mutant.source)


def plant(folder: Path, path: str, text: str) -> None:
    """Writes a file of a copy, and removes what Python compiled of it: its time may not tell the two apart."""
    file = (folder / path).resolve()
    file.write_text(text)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def write(results: dict[str, dict]) -> None:
    file = WORK / "results.json"
    file.with_suffix(".tmp").write_text(json.dumps(results, indent=1, ensure_ascii=False))
    file.with_suffix(".tmp").replace(file)


def line_of(record: dict) -> str:
    by = f"  ← {record['by']}" if record["by"] else ""
    where = f"{record['path']}:{record['line']}"
    return f"{record['verdict']:10s} {record['seconds']:6.1f} s  {where}  {record['rule']}: {record['what']}{by}"


def table(results: dict[str, dict]) -> str:
    """Counts by room, and all that was not killed."""
    kinds = (KILLED, SURVIVED, TIMEOUT, EQUIVALENT)
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for record in results.values():
        parts = record["path"].removeprefix("moe_jax/").split("/")
        room = "semantic" if record["rule"] == "semantic" else parts[0] if len(parts) > 1 else record["path"]
        for name in (room, "total"):
            counts[name][record["verdict"]] += 1
    total = counts.pop("total", collections.Counter())
    lines = [f"{'':24s}" + "".join(f"{kind:>12s}" for kind in (*kinds, "killed, %"))]
    for name, count in [*sorted(counts.items()), ("total", total)]:
        judged = sum(count.values()) - count[EQUIVALENT]
        share = f"{100 * count[KILLED] / judged:.1f}" if judged else "-"
        lines.append(f"{name:24s}" + "".join(f"{count[kind]:12d}" for kind in kinds) + f"{share:>12s}")
    lines += ["", *(line_of(record) for record in results.values() if record["verdict"] in (SURVIVED, TIMEOUT))]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tooling.mutate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--map", action="store_true", help="measure which test runs which line, where not yet known")
    parser.add_argument("--only", help="only source files (with --map: test files) whose path contains this")
    parser.add_argument("--limit", type=int, default=200, help="how many bugs are made by rules (200)")
    parser.add_argument("--seed", type=int, default=0, help="which of all possible ones (0)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (1)")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests for each bug (60)")
    parser.add_argument("--again", default="", help="verdicts to find anew, as survived,timeout")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results (with --map: earlier maps)")
    parser.add_argument("--list", action="store_true", help="show what would be planted")
    args = parser.parse_args(argv)

    WORK.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("MOE_JAX_DATA", str(ROOT.parent / "shared" / "data"))
    if args.map:
        for name in PREPARED:
            __import__(name)
        if args.fresh:
            shutil.rmtree(WORK / "map", ignore_errors=True)
        measure(args.only, args.jobs)
        return 0

    paths = sorted({str(file.relative_to(ROOT)) for pattern in TARGETS for file in ROOT.glob(pattern)})
    paths = [path for path in paths if not args.only or args.only in path]
    by_hand, not_applicable = mutants.semantic(ROOT)
    chosen = [mutant for mutant in by_hand if not args.only or args.only in mutant.path]
    chosen += mutants.sample({path: (ROOT / path).read_text() for path in paths}, args.limit, args.seed)
    if args.list:
        print("\n".join(f"{m.path}:{m.lines[0]}  {m.rule}: {m.description}" for m in chosen))
    else:
        file = WORK / "results.json"
        results = json.loads(file.read_text()) if file.exists() and not args.fresh else {}
        again = set(args.again.split(","))
        open_ones = [m for m in chosen if m.identity not in results or results[m.identity]["verdict"] in again]
        for name in PREPARED:
            __import__(name)
        run(open_ones, covering.Coverage.read(WORK / "map"), results, args)
        reasons = mutants.equivalents()
        of_these = {m.identity: dict(results[m.identity]) for m in chosen}
        for record in of_these.values():
            if record["verdict"] == SURVIVED and (record["path"], *record["change"]) in reasons:
                record["verdict"] = EQUIVALENT
        print(table(of_these))
    for problem in not_applicable:
        print(f"not applicable: {problem}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
