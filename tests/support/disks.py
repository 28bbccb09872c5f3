"""Disks that are full, and programs that are killed, for tests."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.environment import COMPILER_FLAGS, ROOT
from tests.support.forked import OF_MODELS, start


def content_of(directory: Path) -> dict[str, object]:
    """All that a command must write in the same way every time: path of a file -> its bytes, or of JSON, its value.

    Lineages and Orbax's own records have dates, measured figures and places; leaves may be listed in another order.
    """
    found: dict[str, object] = {}
    for file in sorted(Path(directory).rglob("*")):
        if file.is_file():
            found[str(file.relative_to(directory))] = _without_dates(file)
    return found


def _without_dates(file: Path) -> object:
    if file.name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        return None
    if file.name == "lineage.json":
        kept = ("command", "options", "sources", "versions")
        return [{name: entry.get(name) for name in kept} for entry in json.loads(file.read_bytes())]
    return json.loads(file.read_bytes()) if file.name == "_METADATA" else file.read_bytes()


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A real file system of a few MB; the test is skipped where mounting is not permitted."""
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small disk: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_python(
    program: str,
    *arguments: object,
    devices: int = 1,
    encoding: str = "utf-8",
    imports: Sequence[str] | None = OF_MODELS,
) -> subprocess.CompletedProcess:
    """Runs a program in a process of its own that can import this checkout, on CPU devices.

    `imports`, and what others began with, are imported already; None: nothing is.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {COMPILER_FLAGS}",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": encoding,
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    how = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A process that is forked writes in the encoding of the one that it is forked from.
    is_forked = imports is not None and encoding == "utf-8"
    begin = partial(start, imports=imports) if is_forked else subprocess.Popen
    with begin(command, **how) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)
