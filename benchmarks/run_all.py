"""Runs the benchmarks, one after another, each in a process of its own, and writes the pages again.

    python benchmarks/run_all.py WORK [PLACE=VALUE ...] [--only SECTION ...] [--stale] [--list] [--minutes N]

Every section has a command (`evidence/sections.py`) in which words in capitals are places: DATA, the folder of texts
that `claims.py` describes; MODEL and TOWER, SmolLM2-135M and DINOv2-S as Hugging Face directories; TEXT, QUESTIONS,
files of text and of JSONL; MOE and MOES, directories of Mixtures-of-Experts; CHECKOUT, an older commit's;
EXPORTS, directories; LLMC and VLLM, the Pythons that have llm-compressor and vLLM. A value of several words is several
arguments. What lacks a place is left out, and said. WORK keeps what every section says, in `SECTION.log`, and a folder
of its own for each command that has the place WORK. A section that failed does not stop the others; the exit code is
then 1. All of them take some days on two cores; `--minutes` begins no section after so many, and `--stale` takes those
whose code has changed.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from evidence.results import RESULTS
from evidence.sections import SECTIONS, Section
from evidence.stamp import ROOT
from stale import CURRENT, state

WORK = "WORK"
_PLACE = re.compile(r"\b(?:DATA|MODEL|TOWER|TEXT|QUESTIONS|MOES?|CHECKOUT|EXPORTS|LLMC|VLLM|WORK)\b")


def main() -> None:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("work", type=Path, metavar=WORK)
    parser.add_argument("places", nargs="*", metavar="PLACE=VALUE")
    parser.add_argument("--only", nargs="+", choices=names, metavar="SECTION", help=f"of {', '.join(names)}")
    parser.add_argument("--stale", action="store_true", help="only sections whose code has changed since")
    parser.add_argument("--list", action="store_true", help="run nothing, print the commands")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no section after so many")
    options = parser.parse_intermixed_args()
    given = dict(one.partition("=")[::2] for one in options.places)
    if wrong := [name for name in given if not _PLACE.fullmatch(name)]:
        parser.error(f"{wrong[0]} is no place; give PLACE=VALUE")
    until, failed = time.monotonic() + 60 * options.minutes, []
    for section in SECTIONS:
        if (options.only and section.name not in options.only) or (options.stale and not is_stale(section)):
            continue
        commands = commands_of(section, given, options.work)
        if isinstance(commands, str):
            print(f"{section.name}: left out, {commands}")
        elif options.list:
            print(f"{section.name}: {' && '.join(map(' '.join, commands))}")
        elif time.monotonic() > until:
            print(f"{section.name}: not begun, {options.minutes:g} minutes are over")
        elif not ran(section.name, commands, options.work):
            failed.append(section.name)
    if not options.list:
        write_pages()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; their logs are in {options.work}")


def write_pages() -> None:
    """Writes what is made of results, and says what is wrong with it."""
    subprocess.run([sys.executable, ROOT / "benchmarks" / "document.py"], check=False, cwd=ROOT)


def is_stale(section: Section) -> bool:
    """Whether code has changed since any figure of a section was made."""
    return any(not line.endswith(CURRENT) for line in state(section.opened(RESULTS), section.sources))


def commands_of(section: Section, given: Mapping[str, str], work: Path) -> list[list[str]] | str:
    """Returns the words of a section's commands with their places filled in, or why they cannot be run."""
    values = {**given, WORK: str(work / section.name)}
    missing = [name for name in _PLACE.findall(section.command) if not values.get(name)]
    if missing:
        return f"give {' and '.join(f'{name}=...' for name in dict.fromkeys(missing))}"
    found = []
    for command in section.command.split(" && "):
        words = []
        for word in command.split():
            several = _PLACE.fullmatch(word) and word != WORK
            words += values[word].split() if several else [_PLACE.sub(lambda place: values[place[0]], word)]
        found.append(words)
    return found


def ran(name: str, commands: list[list[str]], work: Path) -> bool:
    """Runs commands in the root of the checkout until one fails, prints a line, and returns whether none did."""
    (work / name).mkdir(parents=True, exist_ok=True)
    log, start, code = work / f"{name}.log", time.monotonic(), 0
    with log.open("w") as file:
        for words in commands:
            code = code or subprocess.run([sys.executable, *words[1:]], cwd=ROOT, stdout=file, stderr=file).returncode
    minutes = (time.monotonic() - start) / 60
    print(f"{name}: {'done' if code == 0 else f'failed with {code}, see {log}'}, {minutes:.1f} minutes", flush=True)
    return code == 0


if __name__ == "__main__":
    main()
