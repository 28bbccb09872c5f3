"""The files of a recipe's sources as random-access records, read piece by piece and never as a whole.

(A list in a JSON file is read once, to make JSON lines of it.)

Records are the units of shuffling: a record is a piece of a text file, a line of a JSONL file, or a row of a table.

Rows of a parquet file can only be read in groups, which may be large, and rows of an arrow stream only in order. Both
are copied once, row group by row group, to arrow's file format with the columns that are needed; the copy is mapped
into memory, for direct access to every row. A file in arrow's file format is read as it is.
"""

import bisect
import functools
import itertools
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, clipped, first_sentence, shown
from moe_jax.data.chat_template import ChatTemplate, load_chat_template, read_chat_template, template_file
from moe_jax.data.data_files import DataFile, cached_copy, import_pyarrow, uncompressed
from moe_jax.data.file_forms import as_json_lines, check_file_is_text
from moe_jax.data.rows import Example, RowReader
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.tokenizer import Document, tokenizer_identity
from moe_jax.data.tokens.token_files import TokenRecords
from moe_jax.files.byte_files import open_bytes, size_of
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.files.tokenizer_files import read_tokenizer_file
from moe_jax.models import ModelConfig

# This much of every file is checked before training starts; the rest is checked when it is read.
CHECKED_BYTES = 64 << 20
_LEAST_OF_CONVERSATION = 1 << 10
_MOST_OF_RUN = 4 << 10
_CHUNK = 16 << 20


class Records(Protocol):
    """Random access to the records of a file; `size` is their number of bytes of data."""

    path: Path

    @property
    def size(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[Example | Document]: ...

    def where(self, index: int) -> str:
        """Returns where a record is, for messages."""
        ...


class _DataFileRecords:
    """Records of a file, which has a name of its own in messages: it may be an uncompressed copy."""

    def __init__(self, file: Path | DataFile, name: Path | None):
        self._file = DataFile.of(file)
        self.path = self._file.path
        self._name = name or self.path

    @property
    def size(self) -> int:
        """Number of bytes of the file."""
        return self._file.size


class TextFile(_DataFileRecords):
    """A text file in pieces of about `piece` bytes, cut after a separator, else a line end, else a character.

    Piece k begins at the first such boundary at or after byte `k * piece`, so that it is found without an index. Where
    separators could overlap, as line ends in a row do, they are those that `str.split` finds from the first of the row
    on, if that is at most `_MOST_OF_RUN` bytes before.
    """

    def __init__(self, file: Path | DataFile, *, piece: int, separator: str | None = None, name: Path | None = None):
        super().__init__(file, name)
        self._piece, self._separator = piece, separator
        self._bytes = bytes_ = (separator or "").encode()
        self._may_overlap = any(bytes_.endswith(bytes_[:size]) for size in range(1, len(bytes_)))
        # How far before the byte where a piece may begin a search for the separator before it begins at most.
        self._back = max(_MOST_OF_RUN, 2 * len(bytes_)) if self._may_overlap else len(bytes_)

    def __len__(self) -> int:
        return -(-self.size // self._piece)

    def where(self, index: int) -> str:
        """Returns the name of the file, and where a piece begins in it, about."""
        return f"{self._name}, from byte {index * self._piece:,}" if index else str(self._name)

    def __getitem__(self, index: int) -> list[Example]:
        begin, end = index * self._piece, (index + 1) * self._piece
        # A separator may end at `begin`, or extend across it.
        first = max(0, begin - self._back)
        # The end of the piece is found in the next piece, or after a separator that begins there.
        content = self._file.read(first, end + self._piece + len(self._bytes) - first)
        start, begins = self._cut(content, first, begin)
        stop, ends = self._cut(content, first, end)
        try:
            text = content[start - first : stop - first].decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{self._name} is not UTF-8 text at byte {start + error.start}") from None
        documents = text.split(self._separator) if self._separator else [text]
        last = len(documents) - 1
        return [
            Example(document, begins=begins or i > 0, ends=ends or i < last)
            for i, document in enumerate(documents)
            if document or not (begins or i > 0)
        ]

    def _cut(self, content: bytes, first: int, begin: int) -> tuple[int, bool]:
        """Returns the byte of the file at which the piece for `begin` begins, and whether a document begins there.

        `content` are bytes of the file from `first` on.
        """
        if begin == 0:
            return len(BOM_UTF8) if content.startswith(BOM_UTF8) else 0, True  # it says the encoding, and is no text
        if begin >= self.size:
            return self.size, True
        here = begin - first
        stop = min(here + self._piece, len(content))
        if self._bytes:
            size = len(self._bytes)
            at = self._search_from(content, first, begin) - first - size
            while True:
                # One that begins before `stop` counts, or a line end within it could be taken for a boundary.
                at = content.find(self._bytes, at + size, stop + size - 1)
                if at < 0 or at + size >= here:
                    break
            if at >= 0:
                return first + at + size, True
        at = content.find(b"\n", here, stop)
        if at >= 0:
            return first + at + 1, False
        # Bytes 0b10xxxxxx continue a character.
        later = (i for i in range(here, stop) if content[i] & 0xC0 != 0x80)
        return first + next(later, stop), False

    def _search_from(self, content: bytes, first: int, begin: int) -> int:
        """Returns the byte from which separators are looked for, so that one that ends at `begin` is found.

        No separator extends across it, so that those found are the ones that a search of the whole file finds.
        """
        size, least = len(self._bytes), max(0, begin - self._back)
        at = nearest = max(0, begin - size)
        while self._may_overlap and at > 0:
            if at - size + 1 < least and least > 0:
                return nearest  # the row of separators is too long; the answer must depend on `begin` alone
            found = content.find(self._bytes, max(0, at - size + 1 - first), at + size - 1 - first)
            if found < 0:
                break
            at = first + found
        return at


class JsonLines(_DataFileRecords):
    """A JSONL file; blank lines are skipped. Keeps one offset per line in memory (8 bytes).

    The reader makes examples from the objects on the lines; None: from texts, pairs and conversations with the usual
    keys.
    """

    def __init__(
        self,
        file: Path | DataFile,
        reader: RowReader | None = None,
        *,
        name: Path | None = None,
        unit: Literal["line", "entry"] = "line",
    ):
        super().__init__(file, name)
        self._reader, self._unit = reader or RowReader(), unit
        self._bounds = line_bounds(self._file)
        lengths = np.diff(self._bounds)
        self._lines = None if np.all(lengths > 1) else np.flatnonzero(lengths > 1)  # lines that are not empty

    def __len__(self) -> int:
        return len(self._bounds) - 1 if self._lines is None else len(self._lines)

    def __getitem__(self, index: int) -> list[Example]:
        start, stop = (int(bound) for bound in self._bounds[self._number(index) :][:2])
        line, is_json = self._file.read(start, stop - start), False
        if line.isspace():
            return []
        try:
            # A text may have any number of commas.
            row = parse_json(line, where="a line that", allow=ANYTHING, max_values=len(line))
            is_json = True
            return [example.at(self.where(index), self._name.parent) for example in self._reader(row)]
        except InputError as error:
            problem = error if is_json else f"expected {self._reader.expected}, got {error}"
            raise BadDocument(f"{self.where(index)}: {problem}") from None

    def where(self, index: int) -> str:
        """Returns the name of the file, and the number of a line or entry."""
        return f"{self._name}, {self._unit} {self._number(index) + 1}"

    def _number(self, index: int) -> int:
        """Returns the number of the line of a record in the file, from 0."""
        return index if self._lines is None else int(self._lines[index])


def line_bounds(file: DataFile) -> np.ndarray:
    """Returns the positions where the lines of a file begin, and its end; see `DataFile.line_bounds`.

    For a large object in a bucket they are kept on the disk: finding them again would take reading the whole object.
    """
    if as_path(file.path).at_once == 1 or file.size <= _CHUNK:
        return file.line_bounds(_CHUNK)
    kept = cached_copy(file.path, "lines", lambda handle: np.save(handle, file.line_bounds(_CHUNK)))
    return np.load(kept, mmap_mode="r")


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


_ROWS = 1024  # rows of a batch in a copy


class TableRows:
    """The rows of a parquet or arrow file, of which the reader makes examples.

    Raises:
      InputError: if it is no such file, or has none of the columns that the reader knows; with `checks`, if a table
        that is copied begins with a bad row.
    """

    def __init__(self, path: Path, form: str, reader: RowReader, *, checks: bool = True):
        self.path = path
        self._reader, self._checks = reader, checks
        self._arrow = import_pyarrow(str(path))
        try:
            file, self._size = self._in_file_format(form)
            self._open(file)
        except (self._arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InputError(f"{path} is not a file of {form}: {first_sentence(error)}") from None

    @property
    def size(self) -> int:
        """Number of bytes of the table that is read."""
        return self._size

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> list[Example]:
        batch = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[batch - 1] if batch else 0)
        values = self._batches.get_batch(batch).slice(row, 1)
        return self._examples({name: values.column(i)[0].as_py() for name, i in self._columns.items()}, index)

    def _examples(self, row: dict[str, Any], index: int) -> list[Example]:
        try:
            examples = self._reader({name: _without_nulls(value) for name, value in row.items()})
            return [example.at(self.where(index), self.path.parent) for example in examples]
        except InputError as error:
            raise BadDocument(f"{self.where(index)}: {error}") from None

    def where(self, index: int) -> str:
        """Returns the path of the file, and the number of a row."""
        return f"{self.path}, row {index + 1}"

    def _open(self, file: Path) -> None:
        source = self._arrow.memory_map(str(file))
        self._batches = self._arrow.ipc.open_file(source)
        self._columns = {
            name: self._batches.schema.get_field_index(name) for name in self._needed(self._batches.schema)
        }
        sizes = (self._batches.get_batch(i).num_rows for i in range(self._batches.num_record_batches))
        self._ends = list(itertools.accumulate(sizes))

    def _needed(self, schema: Any) -> list[str]:
        """Returns the columns that the reader reads; raises `InputError` if there are none."""
        needed = self._reader.columns(schema.names)
        if not needed:
            has = clipped(", ".join(map(shown, schema.names)))
            raise InputError(f"{self.path}: expected columns {self._reader.expected}, got {has}")
        return needed

    def _in_file_format(self, form: str) -> tuple[Path, int]:
        """Returns the file itself, or a copy, and the bytes that it counts for: the same on a disk and in a bucket."""
        arrow = self._arrow
        if form == "parquet":
            copy = self._copy(arrow.parquet.read_schema(self._source()), self._row_groups)
            return copy, copy.stat().st_size
        try:
            with arrow.ipc.open_file(self._source()) as file:
                schema = file.schema
            return as_path(self.path).on_disk or self._copy(schema, self._batches_of_file), size_of(self.path)
        except arrow.ArrowInvalid:
            with arrow.ipc.open_stream(self._source()) as stream:
                schema = stream.schema
            copy = self._copy(schema, self._stream)
            return copy, copy.stat().st_size

    def _source(self) -> Any:
        """Returns the file for arrow: mapped into memory, or, in a bucket, read by ranges."""
        on_disk = as_path(self.path).on_disk
        if on_disk is None:
            return self._arrow.PythonFile(open_bytes(self.path), mode="r")
        return self._arrow.memory_map(str(on_disk))

    def _copy(self, schema: Any, batches: Any) -> Path:
        names = self._needed(schema)

        def write(handle: IO[bytes]) -> None:
            writer = None
            for batch in batches(names):
                if writer is None and batch.num_rows and self._checks:
                    # A column that may not be there is found before all others are copied.
                    self._examples({name: batch.column(name)[0].as_py() for name in names}, 0)
                writer = writer or self._arrow.ipc.new_file(handle, batch.schema)
                writer.write_batch(batch)
            writer = writer or self._arrow.ipc.new_file(handle, self._arrow.schema([schema.field(n) for n in names]))
            writer.close()

        return cached_copy(self.path, f"arrow {' '.join(names)}", write)

    def _row_groups(self, names: list[str]) -> Iterator[Any]:
        with self._arrow.parquet.ParquetFile(self._source(), pre_buffer=True) as file:
            yield from file.iter_batches(batch_size=_ROWS, columns=names)

    def _stream(self, names: list[str]) -> Iterator[Any]:
        with self._arrow.ipc.open_stream(self._source()) as stream:
            for batch in stream:
                yield batch.select(names)

    def _batches_of_file(self, names: list[str]) -> Iterator[Any]:
        with self._arrow.ipc.open_file(self._source()) as file:
            for number in range(file.num_record_batches):
                yield file.get_batch(number).select(names)


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys that arrow adds where an object lacks what others in its column have."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


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
