"""A page for every public namespace, in the order of the index in its docstring."""

import inspect
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from moe_jax.core.verb_spec import attribute_texts
from site_pages.commands import in_table, plain
from site_pages.docstrings import dedented_examples, readable, with_links
from site_pages.names import home_of, homes, namespaces, public_names

_ROW = re.compile(r"    (?P<names>\w+(?:, \w+)*,?)(?:\s{2,}(?P<text>\S.*))?$")
_MORE = re.compile(r" {20,}(?P<text>\S.*)$")
FOLDER = "reference/api"
Row = tuple[list[str], str]
# Names that a page can explain and still be read.
_MANY = 12


class Section(NamedTuple):
    """A part of a namespace's index: its title, and rows of names with their text."""

    title: str
    rows: list[Row]


def index_of(docstring: str) -> tuple[str, list[Section]]:
    """Returns the text of a namespace's docstring, and the sections of its index."""
    text: list[str] = []
    sections = [Section("", [])]
    for line in docstring.splitlines():
        if row := _ROW.match(line):
            sections[-1].rows.append((row["names"].rstrip(",").split(", "), row["text"] or ""))
        elif sections[-1].rows and (more := _MORE.match(line)):
            names, before = sections[-1].rows.pop()
            sections[-1].rows.append((names, f"{before} {more['text']}".strip()))
        elif re.match(r"[A-Z].*:$", line) and "`" not in line.partition(",")[0] and text[-1:] == [""]:
            sections.append(Section(line[:-1], []))
        else:
            text.append(line)
    return "\n".join(text).strip(), [section for section in sections if section.rows]


def pages() -> dict[str, str]:
    """Returns the pages by their files, with one that lists them."""
    made = {f"{FOLDER}/{page}.rst": text for name in namespaces() for page, text in _pages_of(name).items()}
    rows = "".join(f"| [`{name}`]({name}.rst) | {in_table(plain(_first_line(name)))} |\n" for name in namespaces())
    # Markdown, so that other documents name it as they name each other.
    made[f"{FOLDER}/index.md"] = (
        f"# Python API\n\n| namespace | what is in it |\n|---|---|\n{rows}\n{{ref}}`genindex` lists all names.\n\n"
        f"```{{toctree}}\n:hidden:\n\n{chr(10).join(namespaces())}\n```\n"
    )
    return made


def _first_line(namespace: str) -> str:
    return (inspect.getdoc(namespaces()[namespace]) or "").partition("\n")[0]


def _pages_of(namespace: str) -> dict[str, str]:
    """Returns the page of a namespace with its index, and a page for every section of one that has many names."""
    text, sections = index_of(inspect.getdoc(namespaces()[namespace]) or "")
    names = set(public_names(namespace))
    sections = [Section(title, _completed(rows, names, sections)) for title, rows in sections]
    written = {name for section in sections for row, _ in section.rows for name in row}
    if rest := sorted(names - written):
        sections.append(Section("", [([name], "") for name in rest]))
    is_divided, divided = len(names) > _MANY, dict[str, str]()
    parts = [_title(namespace), f".. py:module:: {namespace}\n", with_links(dedented_examples(text)) + "\n"]
    for title, rows in sections:
        title, _, more = title.partition(",")
        table = _table(namespace, rows, names)
        own = [
            _entry(namespace, name, text)
            for row, text in rows
            for name in row
            if name in names and home_of(namespace, name) == f"{namespace}.{name}"
        ]
        parts += [_title(title, "-"), f"{with_links(more.strip().capitalize())}.\n" if more else ""] if title else []
        has_page = bool(is_divided and title and own)
        parts += [table, *([] if has_page else own)]
        if has_page:
            page = f"{namespace}-{'-'.join(title.lower().split())}"
            divided[page] = "\n".join([_title(title), f".. py:currentmodule:: {namespace}\n", table, *own])
    return {namespace: "\n".join([*parts, _toctree(divided)]), **divided}


def _toctree(entries: Iterable[str]) -> str:
    listed = "".join(f"   {entry}\n" for entry in entries)
    return f".. toctree::\n   :hidden:\n\n{listed}" if listed else ""


def _completed(rows: list[Row], names: set[str], sections: list[Section]) -> list[Row]:
    """Returns the rows with the names that only their text has, in backticks."""
    listed = {name for section in sections for row, _ in section.rows for name in row}
    return [
        (row + [name for name in re.findall(r"`(\w+)`", text) if name in names - listed], text) for row, text in rows
    ]


def _table(namespace: str, rows: list[Row], names: set[str]) -> str:
    lines = [".. list-table::", "   :widths: 38 62", "   :class: index-of-names", ""]
    for row, text in rows:
        lines.append("   * - " + ", ".join(_linked(namespace, name, names) for name in row))
        lines.append(f"     - {with_links(text)}".rstrip())
    return "\n".join(lines) + "\n"


def _linked(namespace: str, name: str, names: set[str]) -> str:
    if name in names:
        return f":py:obj:`{name} <{home_of(namespace, name)}>`"
    inside = [full for full in (f"{namespace}.{name}", f"moe_jax.{name}") if full in namespaces()]
    return f":py:mod:`{name} <{inside[0]}>`" if inside else f"``{name}``"


def _entry(namespace: str, name: str, text: str) -> str:
    thing: Any = getattr(namespaces()[namespace], name)
    full = homes()[id(thing)]
    if inspect.isclass(thing) and getattr(thing, "__origin__", None) is None:
        # `Attributes:` of the docstring explains them.
        explained = (
            ", ".join({**attribute_texts(thing), **dict.fromkeys(getattr(thing, "_fields", ()))}) or "__weakref__"
        )
        inherits = "   :show-inheritance:\n" if any(id(base) in homes() for base in thing.__bases__) else ""
        return (
            f".. autoclass:: {full}\n   :members:\n   :special-members: __call__\n"
            f"   :exclude-members: {explained}\n{inherits}"
        )
    if inspect.isroutine(thing) or type(thing).__name__ == "custom_vjp":
        return f".. autofunction:: {full}\n"
    if getattr(thing, "__module__", "").startswith("flax"):  # a filter, with its text below it
        return f".. autodata:: {full}\n   :no-value:\n"
    return f".. py:data:: {full}\n   :value: {readable(thing)}\n\n   {with_links(text[:1].upper() + text[1:])}.\n"


def _title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n"
