"""How a model was made: a step for every command of its lineage."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from moe_jax.core.formatting import show_bytes
from moe_jax.report.elements import facts, folded, joined, steps, table

_MAX_TEXT = 400
# These have tables of their own.
_ELSEWHERE = ("layers", "warnings", "points")


def lineage_steps(lineage: Sequence[Mapping[str, Any]]) -> Markup:
    """Returns the commands in their order, each with sources, figures, options and versions."""
    return steps([_step(entry) for entry in lineage])


def _step(entry: Mapping[str, Any]) -> dict[str, Any]:
    command = entry["command"]
    measured = {name: value for name, value in entry.get("measured", {}).items() if name not in _ELSEWHERE}
    scalars = {name: _figure(name, value) for name, value in measured.items() if not isinstance(value, list | dict)}
    others = [(name, in_words(value)) for name, value in measured.items() if isinstance(value, list | dict)]
    options = [(name, in_words(value)) for name, value in entry.get("options", {}).items()]
    versions = [(name, in_words(value)) for name, value in entry.get("versions", {}).items()]
    tables = folded(
        "options, versions" + (", other figures" if others else ""),
        table(f"Options of {command}", ("option", "value"), options, words=2),
        table(f"Other figures of {command}", ("figure", "value"), others, words=2),
        table(f"Versions of what {command} ran with", ("package", "version"), versions, words=2),
    )
    return {
        "command": command,
        "date": str(entry.get("date", "")).replace("T", " "),
        "sources": [_source(source) for source in entry.get("sources", ())],
        "content": joined(facts({name.replace("_", " "): value for name, value in scalars.items()}), tables),
    }


def _source(source: Mapping[str, Any]) -> tuple[str, str]:
    return str(source.get("hub") or source.get("path", "")), str(source.get("fingerprint", ""))


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
