"""The files of a recipe's sources as random-access records, read piece by piece and never as a whole.

(A list in a JSON file is read once, to make JSON lines of it.)

Records are the units of shuffling: a record is a piece of a text file, a line of a JSONL file (`file_records`), or a
row of a table (`table_rows`).
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moe_jax.core.errors import InputError
from moe_jax.data.chat_template import ChatTemplate, load_chat_template, read_chat_template, template_file
from moe_jax.data.data_files import DataFile, uncompressed
from moe_jax.data.file_forms import as_json_lines, check_file_is_text
from moe_jax.data.file_records import JsonLines, Records, TextFile
from moe_jax.data.rows import Example, RowReader
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.table_rows import TableRows
from moe_jax.data.tokenizer import Document, tokenizer_identity
from moe_jax.data.tokens.token_files import TokenRecords
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.files.tokenizer_files import read_tokenizer_file
from moe_jax.models import ModelConfig

# This much of every file is checked before training starts; the rest is checked when it is read.
CHECKED_BYTES = 64 << 20
_LEAST_OF_CONVERSATION = 1 << 10


class Files:
    """The records of several files, one file after the other."""

    def __init__(self, files: Sequence[Records]):
        self._files = files
        self._ends = list(itertools.accumulate(len(file) for file in files))

    @property
    def size(self) -> int:
        """Number of bytes of all files."""
        return sum(file.size for file in self._files)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Sequence[Example | Document]:
        file, within = self._place(index)
        return file[within]

    def where(self, index: int) -> str:
        """Returns where a record is, for messages."""
        file, within = self._place(index)
        return file.where(within)

    def _place(self, index: int) -> tuple[Records, int]:
        which = bisect.bisect_right(self._ends, index)
        return self._files[which], index - (self._ends[which - 1] if which else 0)


def find_files(pattern: str) -> list[Path]:
    """Returns the files that match a path or glob pattern (`**` for any depth), sorted by name.

    The longest beginning of it that is the path of a folder is no pattern, whatever characters it has: `run[1]/*.txt`.

    Raises:
      FileNotFoundError: if there are none.
    """
    place = as_path(pattern)
    if place.is_file():
        return [place]
    paths = place.matching()
    if not paths:
        raise FileNotFoundError(f"no file matches {pattern} ({place.looked_from()}){nearest_path(pattern)}")
    return list(paths)


def check_beginning(files: Sequence[Records]) -> None:
    """Reads the first `CHECKED_BYTES` of every file of texts, to raise most mistakes in them before anything starts.

    Pictures in rows count too, and a conversation as much as a long one, for the template takes as much time.
    Files in buckets are read up to this many bytes in total.
    """
    remote = sum(as_path(file.path).at_once > 1 for file in files)
    for file in files:
        wanted = CHECKED_BYTES // (remote if as_path(file.path).at_once > 1 else 1)
        read = 0
        for index in range(len(file)):
            read += sum(_checked_bytes(example) for example in file[index] if isinstance(example, Example))
            if read >= wanted:
                break


def _checked_bytes(example: Example) -> int:
    pictures = sum(len(picture.data or b"") for picture in example.pictures)
    return pictures + max(len(example.text), 0 if example.spans is None else _LEAST_OF_CONVERSATION)


# Each row of the batch should get at least this many pieces per epoch; otherwise rows would be nearly equal.
_PIECES_PER_ROW = 8
_SEQUENCES_PER_PIECE = 8
_OPENED_AT_ONCE = 8  # files


def open_sources(section: DataSection, config: ModelConfig, batch_size: int, tokenizer_path: Path) -> list[Files]:
    """Opens the records of every source of a recipe's `[data]`. Most mistakes in them are found here.

    Long texts are cut into enough pieces for the `batch_size` rows of a batch.

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
    """Returns the files that match a pattern, at least one: the name of each, and its uncompressed content."""
    names = find_files(pattern)
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
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
    checks: bool = True,
) -> Files:
    """Opens the records of one source, whose `files` are from `named_files`; see `open_sources`.

    Files of tokens must have been made with the special tokens and the template of `section`. `template` is from
    `template_loader`, and `piece` the bytes of a record of text. Without `checks`, a bad row is found when it is read.
    """
    if source.form == "tokens":
        expected = {"tokenizer": tokenizer_identity(tokenizer_path, section.chat_template)}
        expected |= {"bos": section.bos, "eos": section.eos}
        return Files([TokenRecords(file, expected, config.vocab_size) for _, file in files])
    kinds = ("pair",) if config.has_encoder else ("text", "pair", "chat")
    sees = config.vision is not None
    reader = RowReader(source.fields, template=template, chat=source.chat, kinds=kinds, sees=sees)
    opened: list[TextFile] | list[JsonLines] | list[TableRows]
    if source.form == "jsonl":
        lines = [(as_json_lines(name, file), name, file) for name, file in files]
        opened = [
            JsonLines(made, reader, name=name, unit="line" if made is file else "entry") for made, name, file in lines
        ]
    elif source.form == "text":
        if source.format == "auto":
            with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
                list(pool.map(lambda named: check_file_is_text(*named), files))
        opened = [TextFile(file, piece=piece, separator=source.separator, name=name) for name, file in files]
    else:
        opened = [TableRows(file.path, source.form, reader, checks=checks) for _, file in files]
    if checks:
        check_beginning(opened)
    return Files(opened)


def template_loader(section: DataSection, tokenizer_path: Path) -> Callable[[], ChatTemplate]:
    """Returns a function that loads the template for conversations once; see `load_chat_template` for its errors."""

    @functools.cache
    def load() -> ChatTemplate:
        if section.chat_template is not None:
            template = read_chat_template(template_file(section.chat_template), tokenizer_path)
            _check_end(section.chat_template, template, tokenizer_path)
            return template
        return load_chat_template(tokenizer_path)

    return load


def _check_end(name: str, template: ChatTemplate, tokenizer_path: Path) -> None:
    """Raises `InputError` if answers in the library's `llava-v1` would end with a text, and not a token."""
    if name != "llava-v1" or "eos_token" in template.special_tokens:
        return
    if b'"<|endoftext|>"' not in read_tokenizer_file(tokenizer_path):
        raise InputError(
            f"{tokenizer_path.parent} names no EOS token, with which answers end in {name}; give an eos_token in its "
            "tokenizer_config.json"
        )


def check_form(source: SourceSection, verb: str) -> None:
    """Raises `InputError` for a source that a model with an encoder cannot be `verb`, trained or scored, on."""
    if source.form in ("text", "tokens"):
        raise InputError(
            f'{source.path}: a model with an encoder is {verb} on pairs, JSON lines of {{"input": "...", "target": '
            '"..."}, in files *.jsonl or with format = "jsonl"'
        )
    if source.chat:
        raise InputError(f"{source.path}: a model with an encoder is given pairs as they are; leave out chat")
