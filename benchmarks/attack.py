"""Broken and hostile inputs against every reader: how many did harm.

    python benchmarks/attack.py [--inputs 20000] [--each N] [--only WORD ...] [--jobs 2] [--out benchmarks/results]

Tries inputs of all classes of `tests/attack/classes/`, of each in proportion to its share, of the config of each family
at least 288, and prints what became of them and each one that did harm; for classes with bounds of their own also what
the worst took. OUT receives `attack.json`, after every hundred inputs; a run that was stopped is continued, except for
classes that another commit tried. Exits with code 1 if any input did harm.
`--one CLASS NUMBER` tries one input alone.
"""

import argparse
import collections
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evidence.layouts import ATTACK_BOUNDS, ATTACKS
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT, current_stamp

sys.path.insert(0, str(ROOT))

from tests.attack.attacks import Attack, all_attacks  # noqa: E402
from tests.attack.trial import FAULTS, FINE, Outcome, try_inputs  # noqa: E402

# How often the file of results is written.
CHUNK = 100
COLUMNS = (*FINE, *FAULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--inputs", type=int, default=20_000, help="of all classes together")
    parser.add_argument("--each", type=int, metavar="N", help="of every class, instead of its share")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="classes whose names contain one")
    parser.add_argument("--jobs", type=int, default=2, help="classes that are tried at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--one", nargs=2, metavar=("CLASS", "NUMBER"), help="try one input and say what became of it")
    options = parser.parse_args()
    if options.one:
        (outcome,) = try_inputs(options.one[0], [int(options.one[1])])
        print(f"{outcome.verdict}, {outcome.seconds:.2f} s, {outcome.bytes / 1e6:.0f} MB: {outcome.detail}")
        return
    names = [name for name in all_attacks() if any(word in name for word in options.only)]
    figures = Figures("attack", options.out, writes=True)
    whole = sum(map(share_of, all_attacks().values()))
    with ThreadPoolExecutor(options.jobs) as pool:
        list(
            pool.map(lambda name: try_class(figures, name, options.each or wanted(name, options.inputs / whole)), names)
        )
    print(ATTACKS.text(figures), ATTACK_BOUNDS.text(figures), sep="\n\n")
    if any(sum(row[2 + len(FINE) :]) for row in figures.rows(ATTACKS.name)):
        raise SystemExit(1)


def wanted(name: str, times: float) -> int:
    """How many inputs so many times the share of a class are, and no fewer than it is to have."""
    attack = all_attacks()[name]
    return max(attack.least, math.ceil(share_of(attack) * times))


def try_class(figures: Figures, name: str, number: int) -> None:
    """Tries so many inputs of a class, those not tried yet, and stores the counts."""
    counts = collections.Counter(_tried_by_this_commit(figures, name))
    bounds = figures.get("rows", ATTACK_BOUNDS.name, name) if counts else None
    worst = bounds["cells"][3:5] if bounds else [0.0, 0.0]
    for start in range(sum(counts.values()), number, CHUNK):
        for outcome in try_inputs(name, range(start, min(start + CHUNK, number))):
            counts[outcome.verdict] += 1
            worst = [max(worst[0], outcome.seconds), max(worst[1], outcome.bytes / 1e6)]
            if outcome.verdict in FAULTS:
                print(_line(name, outcome), flush=True)
        tried, attack = sum(counts.values()), all_attacks()[name]
        figures.put_row(ATTACKS.name, name, [name, tried, *(counts[column] for column in COLUMNS)])
        if attack.max_bytes != Attack.max_bytes:
            over = counts["hang"] + counts["memory"]
            cells = [[attack.max_seconds, attack.max_bytes / 1e6], *worst, over, counts["wrong"], counts["traceback"]]
            figures.put_row(ATTACK_BOUNDS.name, name, [name, tried, *cells])
        print(f"{name}: {tried} of {number}", flush=True)


def share_of(attack: Attack) -> int:
    """How many inputs of a class are tried, in proportion to those of the others."""
    return attack.quick if attack.share is None else attack.share


def _tried_by_this_commit(figures: Figures, name: str) -> dict[str, int]:
    path = ("rows", ATTACKS.name, name)
    now = current_stamp()
    made = [stamp for stamp, paths in figures.made() if path in paths]
    if not made or (made[0].commit, made[0].uncommitted) != (now.commit, now.uncommitted):
        return {}
    return dict(zip(COLUMNS, figures.get(*path)["cells"][2:], strict=True))


def _line(name: str, outcome: Outcome) -> str:
    return f"{name}, input {outcome.number}, {outcome.verdict}: {outcome.detail}"


if __name__ == "__main__":
    main()
