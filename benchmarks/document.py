"""Writes the tables of BENCHMARKS.md from the files of results.

    python benchmarks/document.py [--check]

What stands between `<!-- NAME: BLOCK -->` and `<!-- end -->` is made from `benchmarks/results/NAME.json`, and so are
the reports `benchmarks/results/NAME.md`; prose around it stays. `--check` changes nothing, says what is out of step,
and exits with code 1 if anything is.
"""

import argparse
import re
from pathlib import Path

from evidence.results import RESULTS
from evidence.sections import SECTIONS
from evidence.stamp import ROOT

DOCUMENT = ROOT / "BENCHMARKS.md"
_BLOCK = re.compile(r"<!-- (?P<name>[^>]+: [^>]+) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="change nothing, say what would change")
    options = parser.parse_args()
    before = DOCUMENT.read_text()
    after, problems = rewritten(before, blocks())
    made = reports()
    if options.check:
        problems += [f"{DOCUMENT.name} is not what the results say"] if after != before else []
        problems += [f"{file} is not what the results say" for file, text in made.items() if file.read_text() != text]
    else:
        DOCUMENT.write_text(after)
        for file, text in made.items():
            file.write_text(text)
    for problem in problems:
        print(problem)
    if problems:
        raise SystemExit(1)


def blocks(folder: Path = RESULTS) -> dict[str, str]:
    """What stands in the blocks of all sections."""
    return {name: text for section in SECTIONS for name, text in section.blocks(folder).items()}


def rewritten(document: str, blocks: dict[str, str]) -> tuple[str, list[str]]:
    """The document with other texts in its blocks, and what is wrong with it beside them."""
    there = [match["name"] for match in _BLOCK.finditer(document)]
    problems = [f"there is no block {name!r} in the results" for name in there if name not in blocks]
    problems += [f"the block {name!r} does not stand in the document" for name in blocks if name not in there]

    def made(match: re.Match[str]) -> str:
        return f"<!-- {match['name']} -->\n{blocks.get(match['name'], match['text'].strip())}\n\n<!-- end -->"

    loose = [line for line in _BLOCK.sub("", document).splitlines() if line.startswith("|")]
    problems += [f"a table that no results make: {line}" for line in loose if re.fullmatch(r"\|[-|: ]+\|", line)]
    return _BLOCK.sub(made, document), problems


def reports(folder: Path = RESULTS) -> dict[Path, str]:
    """The reports beside the results."""
    return {
        folder / f"{section.name}.md": section.report(section.opened(folder)) for section in SECTIONS if section.report
    }


if __name__ == "__main__":
    main()
