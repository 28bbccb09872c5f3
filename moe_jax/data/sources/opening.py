"""Opens the files of a recipe's sources, in every format."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moe_jax.core.errors import InputError
from moe_jax.data.examples import RowReader
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.sources.data_files import DataFile, uncompressed
from moe_jax.data.sources.tables import TableRows
from moe_jax.data.sources.text_files import Files, JsonLines, TextFile, check_beginning, find_files
from moe_jax.data.sources.token_files import TokenRecords
from moe_jax.data.tokens.chat_template import ChatTemplate, load_chat_template, read_chat_template
from moe_jax.data.tokens.tokenizer import tokenizer_identity
from moe_jax.files.storage_path import as_path
from moe_jax.models import ModelConfig

# Each row of the batch should get at least this many pieces per epoch; otherwise rows would be nearly equal.
_PIECES_PER_ROW = 8
_SEQUENCES_PER_PIECE = 8
_AT_ONCE = 8  # files that are opened at the same time


def open_sources(section: DataSection, config: ModelConfig, batch_size: int, tokenizer_path: Path) -> list[Files]:
    """Opens the records of every source. Most mistakes in them are found here.

    Args:
      section: the recipe's `[data]`.
      config: of the model.
      batch_size: rows of a batch; long texts are cut into enough pieces for them.
      tokenizer_path: a `tokenizer.json`.

    Raises:
      FileNotFoundError: a path or pattern that matches no file.
      InputError: no sources, a malformed file, or texts for a model with an encoder.
    """
    if not section.sources:
        raise InputError('the recipe has no data: add [[data.sources]] with path = "..."')
    if config.has_encoder:
        for source in section.sources:
            check_form(source, "trained")
    files = [named_files(source.path) for source in section.sources]
    total = sum(file.size for found in files for _, file in found)
    wanted = total // (_PIECES_PER_ROW * batch_size)
    piece = min(section.piece_kib * 1024, max(wanted, _SEQUENCES_PER_PIECE * section.seq_len))
    template = template_loader(section, tokenizer_path)
    return [
        open_files(source, found, section, config, tokenizer_path, template=template, piece=piece)
        for source, found in zip(section.sources, files, strict=True)
    ]


def named_files(pattern: str) -> list[tuple[Path, DataFile]]:
    """Returns the files that match a pattern: the name of each, and its uncompressed content.

    Raises:
      FileNotFoundError: if there are none.
    """
    names = find_files(pattern)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(zip(names, pool.map(lambda name: DataFile(uncompressed(name)), names), strict=True))


def open_files(
    source: SourceSection,
    files: Sequence[tuple[Path, DataFile]],
    section: DataSection,
    config: ModelConfig,
    tokenizer_path: Path,
    *,
    template: Callable[[], ChatTemplate],
    piece: int,
) -> Files:
    """Opens the records of one source; see `open_sources`.

    Args:
      source: the section of the source.
      files: its files, from `named_files`.
      section: the `[data]` whose special tokens and template files of tokens must have been made with.
      config: of the model.
      tokenizer_path: a `tokenizer.json`.
      template: see `template_loader`.
      piece: bytes of a record of text.
    """
    if source.form == "tokens":
        expected = {"tokenizer": tokenizer_identity(tokenizer_path, section.chat_template)}
        expected |= {"bos": section.bos, "eos": section.eos}
        return Files([TokenRecords(file, expected, config.vocab_size) for _, file in files])
    kinds = ("pair",) if config.has_encoder else ("text", "pair", "chat")
    reader = RowReader(source.fields, template=template, chat=source.chat, kinds=kinds)
    opened = _open_files(source, files, reader, piece)
    check_beginning(opened)
    return Files(opened)


def template_loader(section: DataSection, tokenizer_path: Path) -> Callable[[], ChatTemplate]:
    """Returns a function that loads the template for conversations once; see `load_chat_template` for its errors."""

    @functools.cache
    def load() -> ChatTemplate:
        if section.chat_template is not None:
            return read_chat_template(as_path(section.chat_template), tokenizer_path)
        return load_chat_template(tokenizer_path)

    return load


def _open_files(
    source: SourceSection, files: Sequence[tuple[Path, DataFile]], reader: RowReader, piece: int
) -> list[TextFile] | list[JsonLines] | list[TableRows]:
    """Opens files, each given by its name and its content."""
    if source.form == "jsonl":
        return [JsonLines(file, reader, name=name) for name, file in files]
    if source.form == "text":
        return [TextFile(file, piece=piece, separator=source.separator, name=name) for name, file in files]
    return [TableRows(file.path, source.form, reader) for _, file in files]


def check_form(source: SourceSection, verb: str) -> None:
    """Raises `InputError` for a source that a model with an encoder cannot be `verb`, trained or scored, on."""
    if source.form in ("text", "tokens"):
        raise InputError(
            f'{source.path}: a model with an encoder is {verb} on pairs, JSON lines of {{"input": "...", "target": '
            '"..."}, in files *.jsonl or with format = "jsonl"'
        )
    if source.chat:
        raise InputError(f"{source.path}: a model with an encoder is given pairs as they are; leave out chat")
