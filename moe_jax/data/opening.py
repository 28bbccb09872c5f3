"""Opens the files of a recipe's sources, in every format, and previews them: their first documents as tokens."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.data.chat_template import ChatTemplate, load_chat_template, read_chat_template
from moe_jax.data.data_files import DataFile, uncompressed
from moe_jax.data.examples import Document, Example, RowReader
from moe_jax.data.sections import DataSection, SourceSection, input_length
from moe_jax.data.text_and_tables import Files, JsonLines, TableRows, TextFile, check_beginning, find_files
from moe_jax.data.token_files import TokenRecords
from moe_jax.data.tokenizer import Tokenizer, tokenizer_identity
from moe_jax.files.storage_path import as_path
from moe_jax.models import ModelConfig

# Each row of the batch should get at least this many pieces per epoch; otherwise rows would be nearly equal.
_PIECES_PER_ROW = 8
_SEQUENCES_PER_PIECE = 8
_AT_ONCE = 8  # files that are opened at the same time


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
    opened: list[TextFile] | list[JsonLines] | list[TableRows]
    if source.form == "jsonl":
        opened = [JsonLines(file, reader, name=name) for name, file in files]
    elif source.form == "text":
        opened = [TextFile(file, piece=piece, separator=source.separator, name=name) for name, file in files]
    else:
        opened = [TableRows(file.path, source.form, reader) for _, file in files]
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


def check_form(source: SourceSection, verb: str) -> None:
    """Raises `InputError` for a source that a model with an encoder cannot be `verb`, trained or scored, on."""
    if source.form in ("text", "tokens"):
        raise InputError(
            f'{source.path}: a model with an encoder is {verb} on pairs, JSON lines of {{"input": "...", "target": '
            '"..."}, in files *.jsonl or with format = "jsonl"'
        )
    if source.chat:
        raise InputError(f"{source.path}: a model with an encoder is given pairs as they are; leave out chat")


# Most documents of a source that are counted.
MOST_DOCUMENTS = 1000


@dataclasses.dataclass(frozen=True)
class Part:
    """Neighbouring tokens as text; either all of them are scored or none is."""

    text: str
    scored: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcePreview:
    """A source: counts, and its first documents.

    Attributes:
      path, form: as in the recipe.
      records, bytes: of the whole source.
      counted_records, documents, tokens, scored: of the first records, which were tokenised.
      longest: number of tokens of the longest of these documents.
      too_long: number of these documents that do not fit into a sequence.
      estimated_tokens: of all records, if the others are like the first.
      shown: the first documents.
    """

    path: str
    form: str
    records: int
    bytes: int
    counted_records: int
    documents: int
    tokens: int
    scored: int
    longest: int
    too_long: int
    estimated_tokens: int
    shown: tuple[tuple[Part, ...], ...]


def preview(
    section: DataSection, config: ModelConfig, tokenizer_path: Path, *, batch_size: int, count: int
) -> list[SourcePreview]:
    """Looks at every source of a recipe's `[data]`, and shows its first `count` documents.

    Raises:
      FileNotFoundError, InputError: see `open_sources`; also for text that the tokenizer cannot encode.
    """
    tokenizer = Tokenizer(tokenizer_path, config, bos=section.bos, eos=section.eos)
    sources = open_sources(section, config, batch_size, tokenizer_path)
    length = section.seq_len + (input_length(section) if config.has_encoder else 0)
    found = []
    for settings, files in zip(section.sources, sources, strict=True):
        counted, documents = _first_documents(files, tokenizer)
        lengths = [len(document.ids) for document in documents]
        found.append(
            SourcePreview(
                path=settings.path,
                form=settings.form,
                records=len(files),
                bytes=files.size,
                counted_records=counted,
                documents=len(documents),
                tokens=sum(lengths),
                scored=sum(int(document.scored.sum()) for document in documents),
                longest=max(lengths, default=0),
                too_long=sum(size > length for size in lengths),
                estimated_tokens=sum(lengths) * len(files) // max(counted, 1),
                shown=tuple(tuple(parts(document, tokenizer)) for document in documents[:count]),
            )
        )
    return found


def parts(document: Document, tokenizer: Tokenizer) -> Iterator[Part]:
    """Yields a document as text, cut where scored parts begin and end. The first token is never scored."""
    scored = document.scored > 0
    scored[:1] = False
    edges = [0, *(np.flatnonzero(np.diff(scored)) + 1).tolist(), len(scored)]
    before = ""
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        # Tokenizers of SentencePiece leave out the space at the beginning of a decoded text.
        text = tokenizer.decode(document.ids[:end].tolist(), special=True)
        if not text.startswith(before):  # a character is divided between tokens of both parts
            yield Part(tokenizer.decode(document.ids[begin:end].tolist(), special=True), bool(scored[begin]))
        elif end > begin:
            yield Part(text[len(before) :], bool(scored[begin]))
        before = text


def _first_documents(files: Files, tokenizer: Tokenizer) -> tuple[int, list[Document]]:
    """Returns the number of records read, and their documents."""
    documents: list[Document] = []
    for index in range(len(files)):
        if len(documents) >= MOST_DOCUMENTS:
            return index, documents
        documents += _documents(files[index], tokenizer)
    return len(files), documents


def _documents(examples: Sequence[Example | Document], tokenizer: Tokenizer) -> list[Document]:
    if not tokenizer.has_encoder:
        return tokenizer.documents(examples)
    pairs = [tokenizer.pair(example) for example in examples if isinstance(example, Example)]
    found = []
    for pair in pairs:
        assert pair.inputs is not None
        ids = np.concatenate([pair.inputs, pair.targets])
        found.append(Document(ids, (np.arange(len(ids)) >= len(pair.inputs)).astype(np.float32)))
    return found
