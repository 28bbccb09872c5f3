"""The files that go wherever a model goes, by their standard names: its tokenizer's, and settings for generation."""

from collections.abc import Iterable
from pathlib import Path

TOKENIZER = "tokenizer.json"
_OF_TOKENIZER = frozenset(
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json vocab.txt merges.txt".split()
)
_OTHERS = frozenset({"generation_config.json"})


def is_companion(name: str) -> bool:
    """Whether a file of this name is copied unchanged with the model."""
    return name in _OTHERS or is_of_tokenizer(name)


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer."""
    return name in _OF_TOKENIZER or name.startswith("chat_template") or name.endswith((".model", ".tiktoken"))


def tokenizer_files(file: Path) -> dict[str, Path]:
    """The files of a tokenizer by their standard names: the file itself, whatever it is called, and those beside it."""
    beside = {path.name: path for path in sorted(file.parent.iterdir()) if is_of_tokenizer(path.name)}
    return {name: path for name, path in beside.items() if path.is_file()} | {TOKENIZER: file}


def with_tokenizer(files: Iterable[Path], tokenizer: Path) -> dict[str, Path]:
    """The files of a model by name, with another tokenizer in the place of its own."""
    rest = {path.name: path for path in files if not is_of_tokenizer(path.name)}
    return rest | tokenizer_files(tokenizer)
