"""Which tests run which lines, measured once, so that a planted bug is shown to those that could see it.

Every test file runs in a process of its own under `coverage`, with the test's name as context. A line that is run while
modules are imported (a table, a default, a function that makes one) belongs to no test: all tests that run anything of
its file stand for it.
"""

import ast
import collections
import dataclasses
import hashlib
import json
import time
from pathlib import Path

import pytest

MEASURED = ("moe_jax", "train", "convert")
# These tests read the source as text and fail on any edit that the formatter would lay out otherwise, whatever it does.
OF_TEXT = ("tests/project/test_lint.py", "tests/project/test_messages.py")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Recorder:
    """A pytest plugin that writes `{tests, failed, files}` of what it saw to a JSON file."""

    def __init__(self, root: Path, output: Path):
        import coverage

        self.root, self.output = root, output
        self.coverage = coverage.Coverage(
            data_file=None, source=[str(root / name) for name in MEASURED], messages=False, check_preimported=False
        )
        self.coverage.start()
        self.coverage.switch_context("import")
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        begin = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(time.process_time() - begin, 3)
            self.coverage.switch_context("import")

    def pytest_runtest_logreport(self, report):
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        self.coverage.stop()
        data = self.coverage.get_data()
        names = {name: index for index, name in enumerate(self.seconds)}
        files = {}
        for file in data.measured_files():
            lines, imported = {}, []
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = sorted(names[name] for name in contexts if name in names)
                if "import" in contexts:
                    imported.append(line)
                if tests:
                    lines[line] = tests
            if lines:
                path = Path(file)
                files[str(path.relative_to(self.root))] = {
                    "digest": digest(path.read_text()),
                    "lines": lines,
                    "imported": imported,
                }
        found = {"tests": self.seconds, "failed": sorted(self.failed), "files": files}
        self.output.write_text(json.dumps(found))


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What the recorders of all test files saw."""

    seconds: dict[str, float]
    """Processor time of each test that passed."""
    lines: dict[str, dict[int, set[str]]]
    """The tests that run a line of a file."""
    imported: dict[str, set[int]]
    """The lines of a file that are run when modules are imported."""
    digests: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Coverage":
        seconds, lines, imported, digests = {}, {}, {}, {}
        for record in map(lambda file: json.loads(file.read_text()), sorted(folder.glob("*.json"))):
            left_out = {*record["failed"], *(name for name in record["tests"] if name.startswith(OF_TEXT))}
            passed = {name: taken for name, taken in record["tests"].items() if name not in left_out}
            seconds |= passed
            names = list(record["tests"])
            for path, file in record["files"].items():
                digests[path] = file["digest"]
                imported.setdefault(path, set()).update(file.get("imported", ()))
                at = lines.setdefault(path, {})
                for line, tests in file["lines"].items():
                    at.setdefault(int(line), set()).update(names[i] for i in tests if names[i] in passed)
        return cls(seconds, lines, imported, digests)

    def tests(self, path: str, source: str, changed: range, limit: float) -> list[str]:
        """The tests to run for a change of some lines, the nearest first, of equally near ones the quickest.

        They stop where their processor time would pass `limit` seconds. Where no test runs these lines, an import runs
        them, or the file has changed since it was measured, all tests that run anything of the file are taken, with
        those of its room; where there are none, all tests.
        """
        at = self.lines.get(path, {})
        found: set[str] = set()
        own = lines_of_functions(source) - self.imported.get(path, set())
        if self.digests.get(path) == digest(source) and all(line in own for line in changed):
            found = set().union(*(at.get(line, set()) for line in changed))
            # A program that one test traces is run by others of its file, which trace nothing themselves.
            files = {name.split("::")[0] for name in found}
            found |= {name for name in self.seconds if name.split("::")[0] in files}
            # Tests that start the library in a process of its own are not measured: those that mirror the file.
            found |= {name for name in self.seconds if distance(path, name) == 0}
        if not found:
            found = set().union(*at.values()) | {name for name in self.seconds if distance(path, name) < 2}
        found = found or set(self.seconds)
        chosen, total = [], 0.0
        cases: collections.Counter[str] = collections.Counter()
        ranked = []
        for name in sorted(found, key=lambda name: (self.seconds[name], name)):
            # The cases of one test find much the same: every test comes with its quickest case before any with another.
            function = name.split("[")[0]
            ranked.append((distance(path, name), cases[function], self.seconds[name], name))
            cases[function] += 1
        for *_, name in sorted(ranked):
            total += self.seconds[name]
            if total > limit and chosen:
                break
            chosen.append(name)
        return chosen


def lines_of_functions(source: str) -> set[int]:
    """The lines in the bodies of functions; all others are run when the module is imported."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found.update(range(node.body[0].lineno, node.end_lineno + 1))
    return found


def distance(path: str, test: str) -> int:
    """How far a test is from a source file.

    0: in the file that mirrors it, `nn/moe.py` and `tests/nn/test_moe_layer.py`, or `commands/compress.py` and
    `tests/compression/test_command.py`; 1: in the same room; 2: elsewhere.
    """
    source, file = Path(path.removeprefix("moe_jax/")), Path(test.split("::")[0]).relative_to("tests")
    if source.parts[0] == "commands" and "command" in file.stem and source.stem[:5] in str(file):
        return 0
    if source.parts[:-1] != file.parts[:-1] and source.parts[:1] != file.parts[:1]:
        return 2
    return 0 if file.stem.removeprefix("test_").startswith(source.stem) else 1
