"""Commands that are killed, find a full disk, or are given twice at a time: whether their results are the same.

    python benchmarks/attack_kills.py [--kills 100] [--points 21] [--seed 0] [--only WORD] [--out benchmarks/results]

Every command is killed (SIGKILL) at random times of its work and given again until it is done; runs on disks that are
full after some share of its result, and again when there is room; and is given twice at the same time. Results are
compared byte for byte with those of undisturbed commands, dates and measured figures apart. The models have 260,000
parameters, from the data folder; small disks take the right to mount.
OUT receives `attack_kills.json`. Exits with code 1 if any result was another, any half result looked whole, or anything
was left over.
"""

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from evidence.layouts import FULL_DISKS, KILLS, TWO_AT_A_TIME
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT
from evidence.tables import Table

sys.path.insert(0, str(ROOT))

from tests.attack.interrupted import COMMANDS, COMPILING, Trial, Workshop  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=100, help="of all commands together")
    parser.add_argument("--points", type=int, default=21, help="sizes of full disks, of all commands together")
    parser.add_argument("--seed", type=int, default=0, help="of the times of kills and the sizes of disks")
    parser.add_argument("--only", default="", help="commands whose names contain this")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of real weights")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    names = [name for name in COMMANDS if options.only in name]
    figures, draws = Figures("attack_kills", options.out, writes=True), random.Random(options.seed)
    kills, points = (math.ceil(count / len(COMMANDS)) for count in (options.kills, options.points))
    faults = 0
    with tempfile.TemporaryDirectory() as folder, Workshop(Path(folder) / "work", options.data) as workshop:
        for name in names:
            trials: list[Trial] = []
            while sum(trial.kills for trial in trials) < kills:
                most = min(draws.randint(1, 3), kills - sum(trial.kills for trial in trials))
                trials.append(workshop.kill(name, draws, kills=most))
            faults += _put(figures, KILLS, name, trials, sum(trial.kills for trial in trials))
            shares = [0.95 * (point + draws.random()) / points for point in range(points)]
            faults += _put(figures, FULL_DISKS, name, [workshop.fill_disk(name, share) for share in shares])
            faults += _put(figures, TWO_AT_A_TIME, f"one target: {name}", [workshop.twice(name)])
        for name in sorted(COMPILING & set(names)):
            faults += _put(figures, TWO_AT_A_TIME, f"one cache: {name}", [workshop.share_cache(name)])
    for table in (KILLS, FULL_DISKS, TWO_AT_A_TIME):
        print(table.text(figures))
    raise SystemExit(1 if faults else 0)


def _put(figures: Figures, table: Table, name: str, trials: Iterable[Trial], *counts: int) -> int:
    """Stores a row; prints what is wrong and returns in how many trials."""
    trials = list(trials)
    wrong = [trial.fault for trial in trials if trial.fault is not None]
    for fault in wrong:
        print(f"{table.name}, {name}: {fault}", flush=True)
    went_on = [] if table is TWO_AT_A_TIME else [sum(trial.went_on for trial in trials)]
    figures.put_row(table.name, name, [name, *counts, len(trials), *went_on, len(trials) - len(wrong), len(wrong)])
    print(f"{table.name}, {name}: {len(trials)} trials, {len(wrong)} faults", flush=True)
    return len(wrong)


if __name__ == "__main__":
    main()
