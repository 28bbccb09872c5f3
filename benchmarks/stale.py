"""Lists the figures of the results whose code has changed since they were measured.

    python benchmarks/stale.py [SECTION ...] [--limit N]

Compares the files that a section names as its sources (`evidence/sections.py`) with the commit that its figures were
made at. Changed code need not change a figure: this says what to measure again, or to look at. Exits with code 1 if
the code of more stamps than the limit has changed, or is not known.
"""

import argparse

from evidence.results import RESULTS, ResultsFile
from evidence.sections import SECTIONS
from evidence.stamp import ROOT, Stamp, git

CURRENT = "up to date"


def main() -> None:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"only these, of {', '.join(names)}")
    parser.add_argument("--limit", type=int, help="stamps that may be stale (default: any number)")
    options = parser.parse_args()
    unknown = set(options.sections) - set(names)
    if unknown:
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    lines = [
        f"{section.name}: {line}"
        for section in SECTIONS
        if not options.sections or section.name in options.sections
        for line in state(section.opened(RESULTS), section.sources)
    ]
    print("\n".join(lines))
    stale = sum(not line.endswith(CURRENT) for line in lines)
    print(f"{stale} of {len(lines)} stamps are not of the code that is there now")
    if options.limit is not None and stale > options.limit:
        raise SystemExit(1)


def state(results: ResultsFile, sources: tuple[str, ...], root=ROOT) -> list[str]:
    """One line for every stamp of a file of results."""
    return [f"{stamp.short_line}, {len(paths)} figures: {_since(stamp, sources, root)}"
            for stamp, paths in results.made()]  # fmt: skip


def _since(stamp: Stamp, sources: tuple[str, ...], root) -> str:
    if stamp.uncommitted:
        return "of code that was never committed"
    if stamp.commit is None or git("cat-file", "-e", f"{stamp.commit}^{{commit}}", root=root) is None:
        return "not known, this clone has no such commit"
    changed = (git("diff", "--name-only", stamp.commit, "--", *sources, root=root) or "").split()
    return f"{len(changed)} files of its code have changed since" if changed else CURRENT


if __name__ == "__main__":
    main()
