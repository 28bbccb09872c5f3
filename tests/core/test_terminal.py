"""Guesses of the time left, and where bars are drawn."""

import io
import json

import pytest
import rich.console

from moe_jax.core.terminal import Pace, progress_bars
from tests.support.disks import run_python


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_time_left_is_guessed_from_the_last_steps():
    clock = Clock()
    pace = Pace(0, 20, clock)
    assert pace.left is None
    for done in range(1, 9):  # a resumed job: these had been done
        pace.update(done)
    assert pace.left == 0
    for done in range(9, 15):
        clock.now += 60
        pace.update(done)
    assert pace.left == 6 * 60 and pace.elapsed == 6 * 60
    clock.now += 45
    assert pace.left == 6 * 60 - 45
    clock.now += 1000
    assert pace.left == 0


def test_parts_of_a_step_count():
    """Also of the first one, which may take an hour."""
    clock = Clock()
    pace = Pace(0, 4, clock)
    for part in (0.25, 0.5):
        clock.now += 10
        pace.update(part)
    assert pace.left == 3.5 * 40
    for _ in range(20):
        clock.now += 2
        pace.update(pace.done + 0.05)
    assert pace.done == pytest.approx(1.5) and pace.left == pytest.approx(2.5 * 40)


def test_too_little_tells_nothing():
    """A hundredth of the task, or a step of one that has many: the first part of a step is compiled first."""
    for total, little, enough in ((30, 0.2, 0.3), (1000, 0.9, 1.0)):
        clock = Clock()
        pace = Pace(0, total, clock)
        clock.now += 10
        pace.update(little)
        assert pace.left is None
        pace.update(enough)
        assert pace.left == pytest.approx((total - enough) * 10 / enough)


def test_a_bar_that_starts_late_knows_no_speed():
    pace = Pace(3, 5, Clock())
    pace.update(3)
    assert pace.left is None


ON_A_TERMINAL = """
import os, sys
from rich.console import Console
import rich.console
rich.console.Console.is_terminal = property(lambda self: self.stderr)
from moe_jax.core.terminal import progress_bars
with progress_bars() as progress:
    for layer in range(2):
        for done in range(3):
            progress("aligning", done, 2)
        progress("compressing", layer + 1, 3)
        print('{"layer": %d}' % layer, flush=True)
"""


def test_what_is_printed_for_a_file_is_not_drawn_with_the_bars():
    ran = run_python(ON_A_TERMINAL)
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [{"layer": 0}, {"layer": 1}]
    assert "aligning" in ran.stderr and "compressing" in ran.stderr and "67%" in ran.stderr
    assert "layer" not in ran.stderr


def test_what_takes_long_says_so_in_a_file_too():
    file, now = io.StringIO(), 0.0
    with progress_bars(rich.console.Console(file=file), clock=lambda: now) as progress:
        for done in range(100):
            now = 1.0 * done
            progress("compressing [layers]", done, 100)
    with progress_bars(rich.console.Console(file=file), clock=lambda: now, lines=False) as progress:
        progress("training", 0, 2)
        now += 100.0
        progress("training", 1, 2)
    assert file.getvalue().splitlines() == [
        "compressing [layers]: 30%, 1:10 left",
        "compressing [layers]: 60%, 0:40 left",
        "compressing [layers]: 90%, 0:10 left",
    ]
