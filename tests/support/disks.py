"""Disks that are full, and programs that are killed, for tests."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environment import COMPILER_FLAGS, ROOT


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
    program: str, *arguments: object, devices: int = 1, encoding: str = "utf-8"
) -> subprocess.CompletedProcess:
    """Runs a program in a fresh interpreter that can import this checkout, on CPU devices."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {COMPILER_FLAGS}",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": encoding,
    }
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
