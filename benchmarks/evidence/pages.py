"""Pages of results: Markdown in `benchmarks/pages/`, filled in with tables and single figures from files of results.

A page is a Jinja template. In it stand

    {{ made("NAME") }}                                    the command of a section, and how old its figures are
    {{ table("NAME", "BLOCK") }}                          a table of the section
    {% for block in blocks("NAME") %}                     the names of all tables of the section
    {{ cell("NAME", "BLOCK", "ROW", "COLUMN") }}          one cell of it, as it is written there
    {{ number("NAME", "BLOCK", "ROW", "COLUMN") }}        the first number in that cell, to calculate with
    {{ span("NAME", "BLOCK", "COLUMN", chip=["v5e"]) }}   the least and the greatest cell of a column, of such rows
    {{ total("NAME", "BLOCK", "COLUMN") }}                the sum of a column of whole numbers
    {{ found("PAPER", "CLAIM", "IN SHORT") }}             the effects of a claim in all settings, with their verdicts
    {{ beside("NAME", "BLOCK", "ROW", "IN SHORT") }}      ours beside GPTQ, likewise, from a table of equal bytes
    {{ whole("PEER") }}                                   ours beside a peer, likewise, from that of whole models
    {{ advice() }}                                        the table of advice
    {{ number(...) | ratio_to(number(...)) }}             a ratio, with two decimals
    {{ given("1.2") }}                                    an aim, a size or a bound: chosen, not measured

so that no measured figure is written by hand. `ROW` is the first cell of the row, or a list of its first ones.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from evidence.results import RESULTS
from evidence.sections import SECTIONS, Section, all_blocks, made_line
from evidence.stamp import ROOT
from evidence.studies.claims import LEAST
from evidence.studies.verdicts import Effect, better

PAGES = ROOT / "benchmarks" / "pages"
ADVICE = "advice"
"""The table of advice, of which other pages are made."""
OVERVIEW = "overview"
"""The page that is written to `BENCHMARKS.md`; its links lead from there."""

_EXPRESSION = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
_NO_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|^#[^\n]*$", re.DOTALL | re.MULTILINE)
# Not within a name such as `Qwen1.5` or `v0.3`, a version, or a date.
_MEASURED = re.compile(r"(?<![\w.-])[-+−]?\d[\d,]*(?:(?:\.\d+)?\s?%|\.\d+(?!\.\d))(?![\w])|(?<![\w.-])[+−]\d[\d,.]*")
_NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


class PageError(Exception):
    """A page that asks for what the results do not have."""


class Filled:
    """Fills in pages with the results in a folder.

    Attributes:
      used: names of the blocks that were asked for as tables.
    """

    def __init__(self, folder: Path = RESULTS):
        self._folder = folder
        self.used: set[str] = set()
        self._sections: Mapping[str, Section] = {section.name: section for section in SECTIONS}
        self._rows: dict[str, list[list[str]]] = {}

    @property
    def blocks(self) -> Mapping[str, str]:
        """The tables of all sections, by `NAME: BLOCK`."""
        return all_blocks(self._folder)

    @cached_property
    def _environment(self) -> jinja2.Environment:
        found = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
        found.globals |= {
            "made": self._made,
            "table": self._table,
            "blocks": self._blocks,
            "cell": self._cell,
            "number": self._number,
            "span": self._span,
            "total": self._total,
            "found": self._found,
            "beside": self._beside,
            "whole": self._whole,
            "advice": lambda: self.page(ADVICE).strip(),
            "given": str,
        }
        found.filters["ratio_to"] = lambda one, other: f"{one / other:.2f}"
        return found

    def page(self, name: str) -> str:
        """Returns a page of `PAGES` as Markdown.

        Raises:
          PageError: if it asks for what there is not.
        """
        return self.filled((PAGES / f"{name}.md").read_text("utf-8"))

    def filled(self, template: str) -> str:
        """Returns a template as Markdown; errors as of `page`."""
        try:
            return self._environment.from_string(template).render()
        except jinja2.TemplateError as error:
            raise PageError(str(error)) from error

    def _made(self, name: str) -> str:
        section = self._sections.get(name)
        if section is None:
            raise PageError(f"there is no section {name!r}; there are {', '.join(self._sections)}")
        return made_line(section, section.opened(self._folder))

    def _table(self, name: str, block: str) -> str:
        self.used.add(f"{name}: {block}")
        return self._block(name, block)

    def _blocks(self, name: str) -> list[str]:
        return [full.removeprefix(f"{name}: ") for full in self.blocks if full.startswith(f"{name}: ")]

    def _block(self, name: str, block: str) -> str:
        full = f"{name}: {block}"
        if full not in self.blocks:
            some = ", ".join(self._blocks(name))
            raise PageError(f"there is no table {full!r}; there are {some or 'none of that name'}")
        return self.blocks[full]

    def _cells(self, name: str, block: str) -> list[list[str]]:
        full = f"{name}: {block}"
        if full not in self._rows:
            self._rows[full] = cells_of(self._block(name, block))
        return self._rows[full]

    def _cell(self, name: str, block: str, row: Any, column: str) -> str:
        full = f"{name}: {block}"
        head, *rows = self._cells(name, block)
        wanted = [row] if isinstance(row, str) else list(row)
        found = [one for one in rows if one[: len(wanted)] == wanted]
        if len(found) != 1 or column not in head:
            what = f"column {column!r}" if column not in head else f"single row {wanted!r}"
            raise PageError(f"{full}: there is no {what}; columns {head}, rows {[one[:2] for one in rows]}")
        return found[0][head.index(column)]

    def _number(self, name: str, block: str, row: Any, column: str) -> float:
        return _number_in(self._cell(name, block, row, column))

    def _span(self, name: str, block: str, column: str, **where: Sequence[str]) -> str:
        head, *rows = self._cells(name, block)
        missing = [one for one in (column, *where) if one not in head]
        if missing:
            raise PageError(f"{name}: {block}: there is no column {missing[0]!r}; there are {head}")
        chosen = [row for row in rows if all(row[head.index(key)] in some for key, some in where.items())]
        written = sorted({row[head.index(column)] for row in chosen} - {""}, key=_number_in)
        if not written:
            raise PageError(f"{name}: {block}: no row has {where}")
        return written[0] if len(written) == 1 else f"{written[0]} to {written[-1]}"

    def _total(self, name: str, block: str, column: str) -> str:
        head, *rows = self._cells(name, block)
        return f"{sum(round(_number_in(row[head.index(column)])) for row in rows):,}"

    def _found(self, paper: str, says: str, short: str = "", *, only: str = "", except_for: str | None = None) -> str:
        """Of settings whose name holds `only`, and not `except_for`."""
        head, *rows = self._cells("claims", "verdicts")
        chosen = [
            f"{_setting(row[2])} **{row[-1]}** {row[3]}, {row[4].split(', ')[-1]}{'' if ',' in row[4] else ' seeds'}"
            for row in rows
            if row[:2] == [paper, says] and only in row[2] and (except_for is None or except_for not in row[2])
        ]
        if not chosen:
            raise PageError(f"claims: nothing was found of {paper}: {says!r}")
        return f"{short}: {'; '.join(chosen)}" if short else "; ".join(chosen)

    def _beside(self, name: str, block: str, row: str, short: str) -> str:
        difference = self._cell(name, block, row, "beside GPTQ, nats [95 %]").partition(";")[0]
        ours, bits = (self._cell(name, block, row, column) for column in ("ours, within its bytes", "bits per weight"))
        return f"{short} **{_word(difference)}** {difference} ({ours}; GPTQ {bits})"

    def _whole(self, peer: str) -> str:
        block = "SmolLM2-MoE, against"
        difference, bits, kl, theirs = (
            self._cell("whole_models", block, peer, column)
            for column in ("its loss less theirs, nats [95 %]", "bits per weight", "KL, ours", "KL, theirs")
        )
        said = f"{difference} ({bits} bits per weight; divergence {kl}, theirs {theirs})"
        return f"{peer.partition(': ')[2]} **{_word(difference)}** {said}"


def _setting(name: str) -> str:
    """The name of a setting as a table of advice has it: the model, and whether it came from random weights."""
    model, *about = name.split(", ")
    short = {"middle": "5M", "SmolLM2-135M": "SmolLM2"}.get(model, model)
    return f"{short}, from random weights," if "from random weights" in about else short


def _word(difference: str) -> str:
    """The verdict on ours being better, of a difference with its interval as tables have it."""
    mean, low, high = (float(one) for one in _NUMBER.findall(difference.replace("−", "-"))[:3])
    return better(Effect(mean=mean, low=low, high=high, count=0), LEAST)


def _number_in(written: str) -> float:
    if (found := _NUMBER.search(written)) is None:
        raise PageError(f"there is no number in {written!r}")
    return float(found[0].replace(",", "").replace("−", "-"))


def cells_of(table: str) -> list[list[str]]:
    """The cells of the first table in a Markdown text: its head, then its rows."""
    lines = []
    for line in table.splitlines():
        if line.startswith("|"):
            lines.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
        elif lines:
            break
    return [lines[0], *lines[2:]]


def written_by_hand(template: str) -> list[str]:
    """The figures of a page that look measured, with a decimal point, a percent sign or a sign, and come from nothing.

    Code, links and headings are left out.
    """
    return [found.strip() for found in _MEASURED.findall(_NO_PROSE.sub(" ", _EXPRESSION.sub(" ", template)))]


def names() -> list[str]:
    """The names of all pages but the overview, and what stands in it."""
    return sorted(file.stem for file in PAGES.glob("*.md") if file.stem not in (ADVICE, OVERVIEW))
