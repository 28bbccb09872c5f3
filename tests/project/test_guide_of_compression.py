"""The guide of compression prints its own figures: run on the model that it names, its programs say what it shows."""

import re

import pytest

from tests.support.environment import ROOT
from tests.support.tiers import long
from tests.support.walkthroughs import Command, Ran, form, not_printed, run_document

GUIDE = ROOT / "docs" / "guides" / "compress.md"
# Products in bfloat16 are summed in other orders by other processors, which changes a loss in its fourth digit; a text
# that is cut at another place changed it in the third. Counts and bytes, and errors of weights as they are shown, are
# the same everywhere.
WITHIN = 1e-3
# These show no figures and take minutes.
SLOW = ("--sweep", "--calibrate", "--centre-bits", "generate ")


def figures_of(line: str) -> list[float]:
    """The numbers of a line, without those that are part of a word."""
    found = re.findall(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?", line)
    return [float(number.replace(",", "")) for number in found]


def is_timed(line: str, shown: list[str]) -> bool:
    """Whether a line is of a table with seconds."""
    return line[:1].isdigit() and any("seconds" in one.split() for one in shown)


def differing(ran: Ran) -> list[str]:
    """The lines that a document shows of a command, and that it prints with other figures."""
    printed = {}
    for line in ran.printed.splitlines():
        printed.setdefault(form(line), []).append(figures_of(line))
    wrong = []
    for line in (one for one in ran.command.shown if not is_timed(one, ran.command.shown)):
        wanted = figures_of(line)
        exact = [i for i, number in enumerate(wanted) if number == int(number)]
        if not any(
            found == pytest.approx(wanted, rel=WITHIN) and all(found[i] == wanted[i] for i in exact)
            for found in printed.get(form(line), [])
        ):
            wrong.append(line)
    return wrong


def without_slow(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not any(one in line for one in SLOW))


@long
def test_the_guide_shows_what_its_programs_print(smollm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the model is, by the name that the guide has for it
    compared = 0
    for ran in run_document(without_slow(GUIDE.read_text(encoding="utf-8"))):
        assert ran.code == 0 and not not_printed(ran), ran
        assert not differing(ran), ran.printed
        compared += len(ran.command.shown)
    assert compared > 15


@pytest.mark.parametrize(
    ("shown", "printed", "differs"),
    [
        ("nll 2.8028  perplexity 16.4910", "nll 2.8031  perplexity 16.4950", False),
        ("nll 2.8028  perplexity 16.4910", "nll 2.8068  perplexity 16.5565", True),
        ("1,979 tokens scored", "1,981 tokens scored", True),
        ("model: 348.7 MB", "model: 348.7 MB", False),
        ("model: 348.7 MB", "modules: 348.7 MB", True),
    ],
)
def test_figures_are_compared(shown, printed, differs):
    assert differing(Ran(Command([], [shown]), 0, f"other\n{printed}\n")) == [shown] * differs


def test_seconds_are_not_compared():
    table = ["layer  seconds", "5  2.0"]
    assert not differing(Ran(Command([], table), 0, "layer  seconds\n5  9.0\n"))
