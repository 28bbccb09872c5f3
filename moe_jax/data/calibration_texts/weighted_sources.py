"""The sources of a calibration, and which share of its samples each of them gives.

A command names them in one word: `a.txt`, or `a.txt:2,chats.jsonl:1`, or the path of a TOML file that has the sources
of a recipe (`[[sources]]`, with the keys of `SourceSection`). In place of a file stand `self`, what the model itself
writes, and `built-in`, texts that come with the library.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_jax.core.errors import InputError, is_finite, shown
from moe_jax.data.sections import SourceSection
from moe_jax.files.json_toml import parse, read_toml
from moe_jax.files.storage_path import as_path

SELF = "self"
"""Samples of the model itself."""
BUILT_IN = "built-in"
"""Texts, code, mathematics and conversations that come with the library."""

OneSource = str | os.PathLike[str] | SourceSection
CalibrationSources = OneSource | Sequence[OneSource] | Mapping[Any, float]
"""Values of `calibrate`: one source; several that count alike; or several with their weights. A string may name more
than one, as in a command; a `Path` is one file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedSource:
    """One source of a calibration.

    Attributes:
      name: as the user wrote it, without its weight.
      weight: its share of the samples, relative to those of the other sources.
      file: a file, or files, of texts or rows; None: `self` or `built-in`.
    """

    name: str
    weight: float = 1.0
    file: SourceSection | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SourcesFile:
    """A TOML file with the sources of a calibration."""

    sources: tuple[SourceSection, ...]


def weighted_sources(given: CalibrationSources | None) -> tuple[WeightedSource, ...]:
    """Reads which sources are meant, without opening any but a TOML file that lists them.

    None stands for none. A string that is the path of a file on the disk is that file, whatever commas it has.

    Raises:
      FileNotFoundError: if there is no such TOML file.
      InputError: if it cannot be read, a weight is no number above 0, no source is named, or one is named twice.
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        found = [_weighted(one, weight) for name, weight in given.items() for one in _sources_of(name)]
    elif isinstance(given, str | os.PathLike | SourceSection):
        found = _sources_of(given)
    else:
        found = [one for name in given for one in _sources_of(name)]
    if not found:
        raise InputError("calibrate names no source; give a file, or leave it out")
    seen: dict[str, str] = {}
    for one in found:
        place = one.name if one.file is None else os.path.abspath(as_path(one.file.path))
        if place in seen:
            raise InputError(f"calibrate names {shown(one.name)} twice; name it once, with one weight")
        seen[place] = one.name
    return tuple(found)


def describe_sources(sources: Sequence[WeightedSource]) -> str | list[dict[str, Any]]:
    """Returns what a lineage says of sources: of a single one that is asked for by its name alone, the name."""
    found = []
    for one in sources:
        given = {} if one.file is None else dataclasses.asdict(one.file)
        own = {key: value for key, value in given.items() if value not in (None, False, "auto")}
        found.append({"path": one.name, **own, "weight": one.weight})
    return found[0]["path"] if len(found) == 1 and found[0].keys() == {"path", "weight"} else found


def files_of(sources: Sequence[WeightedSource]) -> tuple[Path, ...]:
    """Returns the paths of the files among sources; patterns are left out."""
    named = [one.file.path for one in sources if one.file is not None]
    return tuple(as_path(path) for path in named if not any(character in path for character in "*?["))


def shares(samples: int, sources: Sequence[WeightedSource]) -> list[int]:
    """Returns how many of the samples each source gives: in proportion to its weight, by largest remainders.

    Raises:
      InputError: if a source would give none.
    """
    total = sum(one.weight for one in sources)
    exact = [samples * one.weight / total for one in sources]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: samples - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        name = sources[counts.index(0)].name
        raise InputError(
            f"calibrate: {shown(name)} has less than one of {samples} samples; ask for more samples, give it more "
            "weight, or leave it out"
        )
    return counts


def _sources_of(given: OneSource) -> list[WeightedSource]:
    """Returns what one entry names: of a string or a TOML file perhaps several sources."""
    if isinstance(given, SourceSection):
        return [_of_section(given)]
    path = os.fspath(given)
    if not isinstance(given, str):
        return _of_toml(path) if _is_toml(path) else [WeightedSource(name=path, file=SourceSection(path=path))]
    if path not in (SELF, BUILT_IN) and ("," in path or ":" in path) and _is_file(path):
        return [WeightedSource(name=path, file=SourceSection(path=path))]
    return [one for part in path.split(",") for one in _of_word(part.strip())]


def _of_word(word: str) -> list[WeightedSource]:
    """Reads NAME or NAME:WEIGHT."""
    name, colon, weight = word.rpartition(":")
    if not colon or "/" in weight or _is_file(word):  # an address has a colon of its own: gs://bucket/a.txt
        name, weight = word, "1"
    if not name:
        raise InputError(f"calibrate {shown(word)}: expected FILE:WEIGHT, such as a.txt:2,chats.jsonl:1")
    try:
        number = float(weight)
    except ValueError:
        raise InputError(f"calibrate {shown(word)}: {shown(weight)} is no number; expected FILE:WEIGHT") from None
    if _is_toml(name):
        return [_weighted(one, number) for one in _of_toml(name)]
    return [_weighted(_of_section(SourceSection(path=name)), number)]


def _of_section(section: SourceSection) -> WeightedSource:
    weight = 1.0 if section.weight is None else section.weight
    if section.path in (SELF, BUILT_IN):
        return WeightedSource(name=section.path, weight=weight)
    if section.separator is not None:
        raise InputError(f"{section.path}: a calibration takes windows of a text as a whole; leave separator out")
    return WeightedSource(name=section.path, weight=weight, file=dataclasses.replace(section, weight=None))


def _of_toml(path: str) -> list[WeightedSource]:
    read = parse(_SourcesFile, read_toml(as_path(path)), where=path, language="TOML")
    return [_of_section(section) for section in read.sources]


def _weighted(source: WeightedSource, weight: Any) -> WeightedSource:
    """Returns a source with so many times its weight."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not (is_finite(weight) and weight > 0):
        raise InputError(f"calibrate {shown(source.name)}: its weight {shown(weight)} must be a number above 0")
    return dataclasses.replace(source, weight=float(weight) * source.weight)


def _is_toml(path: str) -> bool:
    return path.lower().endswith(".toml")


def _is_file(path: str) -> bool:
    try:
        place = as_path(path).on_disk  # a bucket is not asked for a name that nobody may have meant
        return place is not None and place.is_file()
    except (OSError, ValueError, InputError):  # no path at all
        return False
