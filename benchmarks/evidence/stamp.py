"""With what a figure was measured: the commit of the code, the day, the machine, the versions."""

import dataclasses
import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("jax", "flax", "optax", "numpy")
# What a benchmark writes itself, and prose.
_NO_CODE = (":(exclude)benchmarks/results", ":(exclude)*.md")


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Attributes:
    commit: full hash of the commit that was checked out; None where there is no history to ask.
    date: ISO, of the day.
    machine: processor and number of threads.
    versions: of Python and of the packages.
    uncommitted: files of code that differed from the commit. Figures of such code cannot be made again.
    inferred: how the commit was found, where the program did not write it down itself; None where it did.
    """

    commit: str | None
    date: str
    machine: str
    versions: dict[str, str]
    uncommitted: tuple[str, ...] = ()
    inferred: str | None = None

    def __post_init__(self) -> None:
        # JSON has no tuples.
        object.__setattr__(self, "uncommitted", tuple(self.uncommitted))

    @property
    def line(self) -> str:
        """Such as `1df1059, 2026-11-21, x86_64 with 2 threads, Python 3.11.7, jax 0.10.2`."""
        versions = (f"{'Python' if name == 'python' else name} {version}" for name, version in self.versions.items())
        return ", ".join([self.short_line, self.machine, *versions])

    @property
    def short_line(self) -> str:
        """Without machine and versions."""
        commit = "no commit" if self.commit is None else f"`{self.commit[:7]}`"
        if self.inferred:
            commit += " (inferred from the history)"
        if self.uncommitted:
            commit += f" with uncommitted changes to {', '.join(self.uncommitted)}"
        return f"{commit}, {self.date}"


def current_stamp(root: Path = ROOT, *, also: tuple[str, ...] = ()) -> Stamp:
    """The stamp of what is measured now by the code of a checkout; `also` are packages whose versions matter too."""
    commit = git("rev-parse", "HEAD", root=root)
    changed = git("status", "--porcelain", "--no-renames", "--", ".", *_NO_CODE, root=root) or ""
    return Stamp(
        commit=commit.strip() if commit else None,
        date=datetime.date.today().isoformat(),
        machine=f"{processor()} with {os.cpu_count()} threads",
        versions={"python": platform.python_version()} | {name: metadata.version(name) for name in _PACKAGES + also},
        uncommitted=tuple(line[3:] for line in changed.splitlines()),
    )


def processor() -> str:
    """Such as `Intel(R) Xeon(R) Processor, AVX-512`; the architecture where the system says no more."""
    try:
        described = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return platform.machine()
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", described, re.MULTILINE))
    wide = ", AVX-512" if "avx512f" in fields.get("flags", "").split() else ""
    return f"{fields.get('model name', platform.machine())}{wide}"


def git(*words: str, root: Path = ROOT) -> str | None:
    """What git prints; None where there is no git, no repository, or git says no."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def commits_since(commit: str, sources: tuple[str, ...], root: Path = ROOT) -> int | None:
    """How many commits changed files or folders since a commit; None where this clone does not have it."""
    if git("cat-file", "-e", f"{commit}^{{commit}}", root=root) is None:
        return None
    counted = git("rev-list", "--count", f"{commit}..HEAD", "--", *sources, root=root)
    return None if counted is None else int(counted)
