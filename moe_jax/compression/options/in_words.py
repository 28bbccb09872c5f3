"""The compressions that a model has behind it, in words, as its lineage says."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from moe_jax.compression.spec import METHOD_OPTIONS
from moe_jax.core.errors import clipped, flag_of, printable


def compressions_of(lineage: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns a text for every compression in a lineage, the first one first: method, options, and the model before it.

    Options are those of the method that are not at their defaults. A lineage comes from a file: what it lacks is left
    out.
    """
    return tuple(_in_words(entry) for entry in lineage if entry.get("command") == "compress")


def _in_words(entry: Mapping[str, Any]) -> str:
    options = entry.get("options")
    options = options if isinstance(options, Mapping) else {}
    method = options.get("method")
    known = METHOD_OPTIONS.get(method) if isinstance(method, str) else None
    words = [_text(method) if method else "an unknown method"]
    for field in dataclasses.fields(known) if known is not None else ():
        value = options.get(field.name, field.default)
        if isinstance(value, bool) and value != field.default:
            words.append(flag_of(field.name if value else f"no_{field.name}"))
        elif value is not None and value != field.default:
            words += [flag_of(field.name), _text(value)]
    sources = entry.get("sources")
    first = sources[0] if isinstance(sources, list) and sources else None
    path = first.get("path") if isinstance(first, Mapping) else None
    return " ".join(words) + ("" if path is None else f", of {_text(path)}")


def _text(value: Any) -> str:
    return printable(clipped(str(value)))
