"""The part of `make lint` that takes less than a second, and two rules that are not in it; pyright takes longer."""

import subprocess
import sys

import pytest

from tests.support.environment import ROOT

# That lists are equally long is said where they are walked together, and that text is UTF-8 wherever it is read.
SAID = ("check", "--preview", "--select", "B905,PLW1514", "moe_jax", "train", "convert")


@pytest.mark.parametrize(
    "arguments", [("check", "."), ("format", "--check", "."), SAID], ids=["rules", "format", "strict and encoding"]
)
def test_ruff_finds_nothing(arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
