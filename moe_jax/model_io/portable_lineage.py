"""The lineage of a model as it leaves this machine: names and fingerprints, and no paths."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Options that name a file or folder; others hold patterns of leaves, in which slashes are no folders.
_OF_PLACES = {"path", "base", "model_base", "teacher", "text", "calibrate", "calibration_dir", "experts_from",
              "image_folder", "run_dir", "router_from", "file", "tokenizer", "vision_tower", "projector"}  # fmt: skip
_FOLDERS = re.compile(r"(?<![\w.*+?)\]}$^|-])(?:gs:/|~|\.{1,2})?/(?:[^/\"'`;:,*|()]+/)*(?=[^/\s*])")


def without_places(lineage: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a lineage in which every path of a file or folder is its last name."""
    return [_portable(dict(entry)) for entry in lineage]


def name_at(path: str) -> str:
    """Returns the last name of a path; of what `train` writes, `RUN/model`, the name of the run."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..", "~")]
    if len(parts) > 1 and parts[-1] == "model":
        return parts[-2]
    return parts[-1] if parts else path


def _portable(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {
            _FOLDERS.sub("", str(name)): _portable(one, str(name).rpartition(".")[2]) for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_portable(one, key) for one in value]
    if not isinstance(value, str):
        return value
    if key in _OF_PLACES and not value.startswith("@"):
        return name_at(value)
    return _FOLDERS.sub("", value)
