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
        rows = ([self._cell(*pair) for pair in zip(self.forms, row, strict=True)] for row in figures.rows(self.name))
        return markdown(self.head, rows)

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


def tables_of(report: str) -> dict[str, str]:
    """The first table under every heading of a Markdown text that has one."""
    found: dict[str, list[str]] = {}
    heading, is_open = "", False
    for line in report.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|") and (is_open or heading not in found):
            found.setdefault(heading, []).append(line)
            is_open = True
        else:
            is_open = False
    return {heading: "\n".join(lines) for heading, lines in found.items()}
