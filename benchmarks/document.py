"""Writes BENCHMARKS.md, the table of advice and the reports beside the results, from the files of results.

    python benchmarks/document.py [--check]

`benchmarks/pages/overview.md` is filled in to BENCHMARKS.md, and `benchmarks/pages/advice.md` stands in the guide on
choosing a method (`evidence/pages.py` says how pages are written). `make docs` fills in the other pages. `--check`
changes nothing, says what is out of step, and exits with code 1 if anything is.
"""

import argparse
import re
from pathlib import Path

from evidence.pages import ADVICE, OVERVIEW, PAGES, Filled, names, written_by_hand
from evidence.results import RESULTS
from evidence.sections import SECTIONS
from evidence.stamp import ROOT

DOCUMENT = ROOT / "BENCHMARKS.md"
GUIDE = ROOT / "docs" / "guides" / "choose-a-method.md"
_ADVICE = re.compile(r"(?<=<!-- advice -->\n).*(?=<!-- end of advice -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="change nothing, say what would change")
    options = parser.parse_args()
    filled = Filled()
    written = documents(filled)
    problems = problems_of(filled)
    if options.check:
        problems += [f"{file} is not what the results say" for file in out_of_step(written)]
    else:
        for file, text in written.items():
            file.write_text(text, "utf-8")
    for problem in problems:
        print(problem)
    if problems:
        raise SystemExit(1)


def documents(filled: Filled) -> dict[Path, str]:
    """Returns the files that are made of results, with what is to stand in them."""
    advice = filled.page(ADVICE).strip()
    guide, places = _ADVICE.subn(lambda _: f"\n{advice}\n\n", GUIDE.read_text("utf-8"))
    assert places == 1, f"{GUIDE} has no place for the table of advice"
    return {DOCUMENT: filled.page(OVERVIEW), GUIDE: guide} | reports()


def without_advice(text: str) -> str:
    """Returns a document without the table of advice, if it has one."""
    return _ADVICE.sub("", text)


def out_of_step(written: dict[Path, str]) -> list[Path]:
    """The files that do not hold what is to stand in them."""
    return [file.relative_to(ROOT) for file, text in written.items() if file.read_text("utf-8") != text]


def problems_of(filled: Filled) -> list[str]:
    """What is wrong with the pages: figures without a source, tables without one, and tables that stand nowhere."""
    problems = []
    for name in (*names(), OVERVIEW, ADVICE):
        template = (PAGES / f"{name}.md").read_text("utf-8")
        problems += [f"pages/{name}.md: no results make the figure {figure}" for figure in written_by_hand(template)]
        problems += [f"pages/{name}.md: no results make the table {head}" for head in tables_by_hand(name, template)]
        filled.page(name)
    return problems + [f"the table {name!r} stands on no page" for name in filled.blocks if name not in filled.used]


def tables_by_hand(name: str, template: str) -> list[str]:
    """The heads of tables that are written into a page; that of advice is one."""
    heads = re.findall(r"^(\|.*)\n\|[-|: ]+\|$", template, re.MULTILINE)
    return [] if name == ADVICE else heads


def reports(folder: Path = RESULTS) -> dict[Path, str]:
    """The reports beside the results."""
    return {
        folder / f"{section.name}.md": section.report(section.opened(folder)) for section in SECTIONS if section.report
    }


if __name__ == "__main__":
    main()
