"""Lineage: how a model was made, one entry per command. Entries are appended, never rewritten."""

import datetime
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import moe_jax
from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.files.fingerprint import fingerprint_files
from moe_jax.files.json_toml import ANYTHING, read_json
from moe_jax.files.regular_files import Directory, hold
from moe_jax.model_io.hub import hub_origin
from moe_jax.model_io.model_source import ModelSource

LINEAGE_FILE = "lineage.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def new_lineage_entry(
    command: str,
    options: Mapping[str, Any],
    sources: Iterable[ModelSource | Path],
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describes one command.

    Args:
      command: name of the command.
      options: JSON-able, or paths.
      sources: models and files that it read; for a model from the Hugging Face Hub, name and commit are recorded.
      measured: JSON-able measurements (errors, bytes, perplexity).

    Returns:
      An entry with `command`, `options`, `sources`, `versions`, `date` and `measured`.
    """
    return {
        "command": command,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "sources": [_describe(source) for source in sources],
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "measured": dict(measured or {}),
    }


def job_of(lineage: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the identity of the work that a lineage describes: all but date, versions and measurements."""
    return [{name: entry.get(name) for name in ("command", "options", "sources")} for entry in lineage]


def read_lineage(path: Path, *, inside: Directory | None = None) -> list[dict[str, Any]]:
    """Returns the lineage of a model directory; no entries for a directory without one, such as Hugging Face's.

    Args:
      path: path of the directory.
      inside: the directory itself, if it is open already.

    Raises:
      InputError: if lineage.json is not a list of entries.
    """
    held = inside or hold(path)
    if not held.is_file(LINEAGE_FILE):
        return []
    entries = read_json(Path(LINEAGE_FILE), allow=ANYTHING, inside=held)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "command" in entry for entry in entries):
        raise InputError(f"{held.path / LINEAGE_FILE} is not a list of entries, each with a 'command'")
    for i, entry in enumerate(entries):
        _check_entry(entry, f"{held.path / LINEAGE_FILE}, entry {i}")
    return entries


_TYPES = {"command": str, "options": dict, "sources": list, "versions": dict, "date": str, "measured": dict}


def _check_entry(entry: Mapping[str, Any], where: str) -> None:
    """Raises `InputError` unless the values of an entry have the types that `new_lineage_entry` writes."""
    wrong = [name for name, kind in _TYPES.items() if name in entry and type(entry[name]) is not kind]
    raise_if_any([f"{name} is {shown(entry[name])}" for name in wrong], where)
    for source in entry.get("sources", ()):
        if not isinstance(source, dict) or not all(type(source.get(key)) is str for key in ("path", "fingerprint")):
            raise InputError(f"{where}: a source is {shown(source)}, expected an object with 'path' and 'fingerprint'")


def _describe(source: ModelSource | Path) -> dict[str, str]:
    if isinstance(source, Path):
        return {"path": str(source), "fingerprint": fingerprint_files([source])}
    origin = hub_origin(source.path)
    described = {"path": str(source.path), "fingerprint": source.fingerprint()}
    return described if origin is None else described | {"hub": origin}


def _versions() -> dict[str, str]:
    versions = {"moe_jax": moe_jax.__version__, "python": platform.python_version()}
    return versions | {package: importlib.metadata.version(package) for package in _PACKAGES}
