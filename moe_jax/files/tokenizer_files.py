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

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""How pictures are processed: the newest releases of Transformers have all of it in the second, and read both."""
MAX_BYTES = 256 << 20
_OF_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
)
_LIST = "files.json"


def tokenizer_files_in(directory: Path) -> tuple[Path, ...]:
    """Returns the files in the directory of a model that are copied unchanged with it, sorted. No others are copied.

    Raises:
      InputError: for a link to a file elsewhere.
    """
    directory = as_path(directory)
    if isinstance(directory, BucketPath):
        return tuple(file for file in _in_bucket(directory) if goes_with_model(file.name))
    files = sorted(file for file in directory.iterdir() if goes_with_model(file.name) and file.is_file())
    _refuse_links_out(directory, files)
    return tuple(files)


def copy_tokenizer_files(files: Mapping[str, Path | bytes], directory: StoragePath) -> None:
    """Copies files that go with a model, or their contents, given by their new names, to its directory.

    In a bucket, where listings may not show them yet, a list of them is written too.
    """
    for name, file in files.items():
        (directory / name).write_durably(file if isinstance(file, bytes) else read_tokenizer_file(file))
    if isinstance(directory, BucketPath):
        (directory / _LIST).write_bytes(json.dumps({"files": sorted(files)}).encode())


def read_tokenizer_file(file: Path) -> bytes:
    """Returns the content of a file that goes with a model, which must be regular and have at most `MAX_BYTES`."""
    return read_regular(file, max_bytes=MAX_BYTES)


def _in_bucket(directory: BucketPath) -> list[Path]:
    """Returns the files that a listing shows, and those that `copy_tokenizer_files` has recorded."""
    names = {child.name for child in directory.iterdir()}
    with contextlib.suppress(FileNotFoundError):  # it was copied there from a disk
        try:
            listed = json.loads((directory / _LIST).read_bytes())["files"]
            names |= {name for name in listed if isinstance(name, str) and "/" not in name}
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{directory / _LIST} is damaged: it does not list files") from None
    return [directory / name for name in sorted(names)]


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
    """Whether a file of this name goes wherever its model goes."""
    return name in (GENERATION, PREPROCESSOR, PROCESSOR) or is_of_tokenizer(name)


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer."""
    return name in _OF_TOKENIZER or name.startswith("chat_template") or name.endswith((".model", ".tiktoken"))


def tokenizer_files(file: Path) -> dict[str, Path]:
    """Returns the files of a tokenizer by their standard names: `file` itself, whatever its name, and those beside it.

    Raises:
      InputError: for a link to a file elsewhere.
    """
    directory, own = as_path(file).parent, {TOKENIZER: file}
    if isinstance(directory, BucketPath):
        return {path.name: path for path in _in_bucket(directory) if is_of_tokenizer(path.name)} | own
    beside = [path for path in sorted(file.parent.iterdir()) if is_of_tokenizer(path.name) and path.is_file()]
    _refuse_links_out(file.parent, [path for path in beside if path != file])
    return {path.name: path for path in beside} | own


def with_tokenizer(files: Iterable[Path], tokenizer: Path) -> dict[str, Path]:
    """Returns the files of a model by name, with another tokenizer instead of its own."""
    rest = {path.name: path for path in files if not is_of_tokenizer(path.name)}
    return rest | tokenizer_files(tokenizer)
