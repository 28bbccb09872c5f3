"""Names of models: of one on the Hugging Face Hub, `org/name` or `org/name@revision`; `RUN@STEP`; or a path.

A text is taken as a path if it exists on the disk, or could: if its first part is a folder here.
"""

import os
import re
from pathlib import Path

from moe_jax.files.storage_path import as_path

# The names that the Hub allows. Only the single slash tells a name from a path.
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w][\w./-]{{0,200}}))?")


def is_hub_name(path: Path | str) -> bool:
    """Whether a text names a model on the Hub and not a path, by the rule at the top of this module."""
    text = os.fspath(path)
    found = _name(text)
    if found is None or os.path.lexists(text):
        return False
    return not os.path.lexists(found["repository"]) and not os.path.lexists(text.split("/")[0])


def why_a_path(path: Path | str) -> str:
    """Returns why a path was not taken for a name on the Hub, if it could be one; for the message that it is absent."""
    text = os.fspath(path)
    if _name(text) is None or os.path.lexists(text) or is_hub_name(text):
        return ""
    return f"; it is not looked for on the Hugging Face Hub, because there is a {text.split('/')[0]} in {Path.cwd()}"


def _name(text: str) -> re.Match[str] | None:
    return None if ".." in text or "--" in text else NAME.fullmatch(text)


def is_absent(path: Path | str) -> bool:
    """Whether there is nothing at a path on the disk, which names neither a model on the Hub nor a checkpoint."""
    place = as_path(path)
    return place.renames and "@" not in place.name and not place.exists() and not is_hub_name(path)


def split_step(path: Path) -> tuple[Path, int] | None:
    """Returns the run and the step of `RUN@STEP`; None if the path does not have this form, or exists."""
    match = re.fullmatch(r"(.+)@(\d{1,18})", Path(path).name)
    if match is None or as_path(path).exists():
        return None
    return as_path(path).with_name(match[1]), int(match[2])
