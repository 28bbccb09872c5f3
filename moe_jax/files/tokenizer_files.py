"""The files that go wherever a model goes, by their standard names.

They are its tokenizer's, settings for generation, and how pictures are processed.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from moe_jax.core.errors import InputError
from moe_jax.files.regular_files import read_regular
from moe_jax.files.storage_path import BucketPath, StoragePath, as_path

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""How pictures are processed: the newest releases of Transformers have all of it in the second, and read both."""
MAX_BYTES = 256 << 20
_OF_TOKENIZER = (
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
)
_TEMPLATES, _TEMPLATE = "additional_chat_templates", ".jinja"
"""A folder, the only one whose files go with a model: templates of chats beside the usual one, each with a name."""
_LIST = "files.json"


def tokenizer_files_in(directory: Path) -> tuple[Path, ...]:
    """Returns the files in the directory of a model that are copied unchanged with it, sorted. No others are copied.

    Raises:
      InputError: for a link to a file elsewhere.
    """
    directory = as_path(directory)
    if isinstance(directory, BucketPath):
        return tuple(file for name, file in by_name(_in_bucket(directory)).items() if goes_with_model(name))
    files = [file for name, file in by_name(_on_disk(directory)).items() if goes_with_model(name)]
    _refuse_links_out(directory, files)
    return tuple(files)


def by_name(files: Iterable[Path]) -> dict[str, Path]:
    """Returns files that go with a model by the names that they have in its directory, a folder among them."""
    return {_name(file): as_path(file) for file in files}


def _name(file: Path) -> str:
    is_template = file.parent.name == _TEMPLATES and file.suffix == _TEMPLATE
    return f"{_TEMPLATES}/{file.name}" if is_template else file.name


def copy_tokenizer_files(files: Mapping[str, Path | bytes], directory: StoragePath) -> None:
    """Copies files that go with a model, or their contents, given by their new names, to its directory.

    In a bucket, where listings may not show them yet, a list of them is written too.
    """
    for name, file in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_durably(file if isinstance(file, bytes) else read_tokenizer_file(file))
    for folder in {(directory / name).parent for name in files}:
        folder.sync()
    if isinstance(directory, BucketPath):
        (directory / _LIST).write_bytes(json.dumps({"files": sorted(files)}).encode())


def read_tokenizer_file(file: Path) -> bytes:
    """Returns the content of a file that goes with a model, which must be regular and have at most `MAX_BYTES`."""
    return read_regular(file, max_bytes=MAX_BYTES)


def _in_bucket(directory: BucketPath) -> list[Path]:
    """Returns the files that a listing shows, and those that `copy_tokenizer_files` has recorded."""
    names = {child.name for child in directory.iterdir()}
    if _TEMPLATES in names:
        names |= {f"{_TEMPLATES}/{child.name}" for child in (directory / _TEMPLATES).iterdir()}
    with contextlib.suppress(FileNotFoundError):  # it was copied there from a disk
        try:
            listed = json.loads((directory / _LIST).read_bytes())["files"]
            names |= {name for name in listed if isinstance(name, str) and ("/" not in name or goes_with_model(name))}
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{directory / _LIST} is damaged: it does not list files") from None
    return [directory / name for name in sorted(names)]


def _on_disk(directory: Path) -> list[Path]:
    """Returns the files in the directory of a model, and those with further templates, sorted."""
    below = directory / _TEMPLATES
    children = [*directory.iterdir(), *(below.iterdir() if below.is_dir() else ())]
    return sorted(child for child in children if child.is_file())


def _refuse_links_out(directory: Path, files: Iterable[Path]) -> None:
    """Raises `InputError` for a link to a file elsewhere: a private file could be published under its name.

    In the cache of the Hugging Face hub, the files of a snapshot are links into the folder `blobs` beside `snapshots`.
    """
    home = directory.resolve()
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(home) for home in homes):
            raise InputError(f"{file} is a link to {target}, outside of {directory}; put a copy there, or remove it")


def goes_with_model(name: str) -> bool:
    """Whether a file of this name in the directory of a model, as in `by_name`, goes wherever the model goes."""
    return name in (GENERATION, PREPROCESSOR, PROCESSOR) or is_of_tokenizer(name)


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of this name, as in `by_name`, belongs to a tokenizer."""
    if "/" in name:
        folder, _, file = name.partition("/")
        return folder == _TEMPLATES and file.endswith(_TEMPLATE) and "/" not in file
    return name in _OF_TOKENIZER or name.startswith("chat_template") or name.endswith((".model", ".tiktoken"))


def tokenizer_files(file: Path) -> dict[str, Path]:
    """Returns the files of a tokenizer by their standard names: `file` itself, whatever its name, and those beside it.

    Raises:
      InputError: for a link to a file elsewhere.
    """
    directory, own = as_path(file).parent, {TOKENIZER: file}
    if isinstance(directory, BucketPath):
        return {name: path for name, path in by_name(_in_bucket(directory)).items() if is_of_tokenizer(name)} | own
    beside = {name: path for name, path in by_name(_on_disk(directory)).items() if is_of_tokenizer(name)}
    _refuse_links_out(directory, [path for path in beside.values() if path != file])
    return beside | own


def with_tokenizer(files: Iterable[Path], tokenizer: Path) -> dict[str, Path]:
    """Returns the files of a model by name, with another tokenizer instead of its own."""
    rest = {name: path for name, path in by_name(files).items() if not is_of_tokenizer(name)}
    return rest | tokenizer_files(tokenizer)
