"""The library with single bounds taken out: which input of a class is the first to do harm.

    python benchmarks/attack_faults.py [--inputs 300] [--only WORD] [--out benchmarks/results]

What a class of `tests/attack/classes/` finds of broken bounds says what it is worth that it finds nothing otherwise.
The faults are in `tests/attack/unbounded/`; each is planted in a process of its own. OUT receives `attack_faults.json`.
Exits with code 1 if any fault was not found.
"""

import argparse
import sys
from pathlib import Path

from evidence.layouts import ATTACK_FAULTS
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT

sys.path.insert(0, str(ROOT))

from tests.attack import unbounded  # noqa: E402
from tests.attack.trial import FAULTS as VERDICTS  # noqa: E402
from tests.attack.trial import Outcome, try_inputs  # noqa: E402
from tests.attack.unbounded import faults  # noqa: E402

NAMES: dict[str, str] = dict(
    executed="executed", escape="files elsewhere", wrong="silently wrong", hang="too slow", memory="too much memory",
    traceback="traceback or end of the process", echo="message too long",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--inputs", type=int, default=300, help="that are tried until one does harm")
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("attack_faults", options.out, writes=True)
    for name, fault in faults.FAULTS.items():
        if options.only in name:
            found = first_harm(name, options.inputs)
            harm, number = ("none", options.inputs) if found is None else (NAMES[found.verdict], found.number + 1)
            figures.put_row(ATTACK_FAULTS.name, name, [name, fault.of, number, harm])
            print(f"{name}: {harm}, {number} inputs {found.detail[:100] if found else ''}", flush=True)
    print(ATTACK_FAULTS.text(figures))
    if any(row[-1] == "none" for row in figures.rows(ATTACK_FAULTS.name)):
        raise SystemExit(1)


def first_harm(name: str, inputs: int) -> Outcome | None:
    """The first of so many inputs that does harm where this fault is planted."""
    return next((one for one in try_inputs(name, range(inputs), unbounded.__name__) if one.verdict in VERDICTS), None)


if __name__ == "__main__":
    main()
