"""Tables in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from evidence.results import Figures


class Table(NamedTuple):
    """A table of a program that measures all of it at once.

    Attributes:
      name: of its rows in the file of results.
      head: names of the columns.
      forms: how the cells of every column are written, as `str.format` takes it; a list in a cell is its arguments.
    """

    name: str
    head: tuple[str, ...]
    forms: tuple[str, ...]

    def text(self, figures: Figures) -> str:
        """The table as it stands in the results."""
        return markdown(self.head, ([self._cell(*pair) for pair in zip(self.forms, row, strict=True)]
                                    for row in figures.rows(self.name)))  # fmt: skip

    @staticmethod
    def _cell(form: str, value: Any) -> str:
        if value is None:
            return ""
        return form.format(*value) if isinstance(value, list) else form.format(value)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Head, rule and rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def tables_of(report: str) -> dict[str, list[str]]:
    """The tables of a Markdown text, by the heading above them; under "" those above every heading."""
    found: dict[str, list[str]] = {"": []}
    heading, before = "", ""
    for line in report.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            found.setdefault(heading, [])
        elif line.startswith("|"):
            if before.startswith("|"):
                found[heading][-1] += f"\n{line}"
            else:
                found[heading].append(line)
        before = line
    return found
