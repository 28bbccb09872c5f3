"""How a model was made: a step for every command of its lineage."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moe_jax.core.formatting import show_bytes
from moe_jax.report.elements import facts, folded, table
from moe_jax.report.markup import Markup, element, joined

_MAX_TEXT = 400
# These have tables of their own.
_ELSEWHERE = ("layers", "warnings", "points")
# Bytes of a fingerprint that tell models apart.
_SHORT = 12


def lineage_steps(lineage: Sequence[Mapping[str, Any]]) -> Markup | None:
    """The commands in their order, each with sources, figures, options and versions; None if there are none."""
    steps = [element("li", *_step(entry)) for entry in lineage]
    return element("ol", *steps, class_="steps") if steps else None


def _step(entry: Mapping[str, Any]) -> list[Markup | None]:
    command = entry["command"]
    measured = {name: value for name, value in entry.get("measured", {}).items() if name not in _ELSEWHERE}
    scalars = {name: _figure(name, value) for name, value in measured.items() if not isinstance(value, list | dict)}
    others = [(name, in_words(value)) for name, value in measured.items() if isinstance(value, list | dict)]
    options = [(name, in_words(value)) for name, value in entry.get("options", {}).items()]
    versions = [(name, in_words(value)) for name, value in entry.get("versions", {}).items()]
    return [
        element("h4", f"moe-jax {command}"),
        element("p", str(entry.get("date", "")).replace("T", " "), class_="note"),
        *map(_source, entry.get("sources", ())),
        facts({name.replace("_", " "): value for name, value in scalars.items()}),
        folded(
            "options, versions" + (", other figures" if others else ""),
            table(f"Options of {command}", ("option", "value"), options, words=2),
            table(f"Other figures of {command}", ("figure", "value"), others, words=2),
            table(f"Versions of what {command} ran with", ("package", "version"), versions, words=2),
        ),
    ]


def _source(source: Mapping[str, Any]) -> Markup:
    where = str(source.get("hub") or source.get("path", ""))
    fingerprint = str(source.get("fingerprint", ""))
    short = joined(" ", element("code", fingerprint[:_SHORT], title=fingerprint))
    return element("p", "from ", element("strong", where), short)


def _figure(name: str, value: Any) -> str:
    """A figure in words; bytes have a unit."""
    return show_bytes(value) if name.split("_")[-1] == "bytes" and type(value) is int else in_words(value)


def in_words(value: Any) -> str:
    """A value of a lineage entry: numbers as they are read, anything else as JSON, not all of it if it is long."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) > 9999 else str(value)
    if isinstance(value, float):
        return f"{value:,.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text):,} characters)"
