"""Previews the sources of a recipe, or tokenises them once, in several processes, into files of tokens (`token_files`).

The records of a source are divided into shards, a file each, in a way that does not depend on the number of processes.
A finished shard stays when the command is killed; the same command then makes the others.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.core.worker_pool import worker_pool
from moe_jax.data.packing import fitted
from moe_jax.data.pictures.picture_loading import PictureLoader, picture_loader
from moe_jax.data.pipeline import picture_room
from moe_jax.data.rows import Example
from moe_jax.data.sections import DataSection, input_length
from moe_jax.data.sources import Files, find_files, open_sources
from moe_jax.data.tokenizer import Document, Tokenizer, tokenizer_identity
from moe_jax.data.tokens.token_files import FORMAT, INDEX, SUFFIX, VERSION, TokenFile, TokenIndex, pack
from moe_jax.files.byte_files import fingerprint_contents
from moe_jax.files.staging import check_target, open_work
from moe_jax.files.storage_path import StoragePath, as_path
from moe_jax.models import ModelConfig


class Task(NamedTuple):
    """The sources to tokenise, the `[data]` of a recipe, and how; `batch_size` decides how texts are cut."""

    section: DataSection
    config: ModelConfig
    tokenizer_path: Path
    batch_size: int


# Most documents of a source that are counted.
MOST_DOCUMENTS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Neighbouring tokens as text; either all of them are scored or none is.

    Attributes:
      text: of the tokens; of those that stand for a picture, in words, which picture it is, and its size.
      picture: its name, or `a picture in the row`; None: the tokens are of a text.
    """

    text: str
    scored: bool
    picture: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcePreview:
    """A source: counts, and its first documents.

    Attributes:
      records, bytes: of the whole source.
      counted_records, documents, tokens, scored: of the first records, which were tokenised.
      longest: number of tokens of the longest of these documents.
      pictures: number of pictures in these documents.
      too_long: number of these documents that do not fit into a sequence; with an encoder, of those whose input or
        target is longer than it may be.
      estimated_tokens: of all records, if the others are like the first.
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
    pictures: int
    too_long: int
    estimated_tokens: int
    shown: tuple[tuple[Part, ...], ...]


def preview(
    section: DataSection, config: ModelConfig, tokenizer_path: Path, *, batch_size: int, count: int
) -> list[SourcePreview]:
    """Looks at every source of a recipe's `[data]`, and shows its first `count` documents.

    Raises:
      FileNotFoundError, InputError: see `open_sources`; also for text that the tokenizer cannot encode, pictures of
        the documents shown that cannot be read, and documents whose pictures do not go into a row.
    """
    tokenizer = Tokenizer(tokenizer_path, config, bos=section.bos, eos=section.eos)
    load = None if config.vision is None else picture_loader(section, config)
    sources = open_sources(section, config, batch_size, tokenizer_path)
    skips = section.on_bad_image == "skip"
    room = None if config.has_encoder else picture_room(section, config, sources, tokenizer.per_picture)

    def is_too_long(document: Document) -> bool:
        if not config.has_encoder:
            return len(document.ids) > section.seq_len + 1  # a sequence is of tokens that each have a next one
        scored = int(document.scored.sum())
        return scored > section.seq_len or len(document.ids) - scored > input_length(section)

    found = []
    for settings, records in zip(section.sources, sources, strict=True):
        counted, documents = _first_documents(records, tokenizer, whole=count)
        for document in documents:
            fitted(document, room, section.seq_len)
        lengths = [len(document.ids) for document in documents]
        found.append(
            SourcePreview(
                path=settings.path,
                form=settings.form,
                records=len(records),
                bytes=records.size,
                counted_records=counted,
                documents=len(documents),
                tokens=sum(lengths),
                scored=sum(int(document.scored.sum()) for document in documents),
                longest=max(lengths, default=0),
                pictures=sum(len(document.pictures) for document in documents),
                too_long=sum(map(is_too_long, documents)),
                estimated_tokens=sum(lengths) * len(records) // max(counted, 1),
                shown=tuple(tuple(parts(document, tokenizer, load, skips=skips)) for document in documents[:count]),
            )
        )
    return found


def parts(
    document: Document, tokenizer: Tokenizer, load: PictureLoader | None = None, *, skips: bool = False
) -> Iterator[Part]:
    """Yields a document as text, cut where scored parts begin and end. The first token is never scored.

    Pictures, which `load` reads, are parts of their own; where one cannot be read, it says so if such are skipped.
    """
    scored = document.scored > 0
    scored[:1] = False
    if document.slots is None:
        yield from _texts(document.ids, scored, tokenizer)
        return
    assert load is not None, "the model takes pictures"
    count, end = tokenizer.per_picture, 0
    begins = np.flatnonzero((document.slots > 0) & ((document.slots - 1) % count == 0))
    for picture, begin in zip(document.pictures, begins, strict=True):
        yield from _texts(document.ids[end:begin], scored[end:begin], tokenizer)
        end = begin + count
        try:
            width, height = load.size(picture)
            size = f"{width} x {height} pixels"
        except BadDocument:
            if not skips:
                raise
            size = "cannot be read, and the document is left out"
        yield Part(text=f"[{picture.shown}: {size}, {count} tokens]", scored=False, picture=picture.shown)
    yield from _texts(document.ids[end:], scored[end:], tokenizer)


def _texts(ids: np.ndarray, scored: np.ndarray, tokenizer: Tokenizer) -> Iterator[Part]:
    """Yields neighbouring tokens as text, cut where scored parts begin and end."""
    edges = [0, *(np.flatnonzero(np.diff(scored)) + 1).tolist(), len(scored)] if len(scored) else [0]
    before = ""
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        # Tokenizers of SentencePiece leave out the space at the beginning of a decoded text.
        text = tokenizer.decode(ids[:end].tolist(), special=True)
        if not text.startswith(before):  # a character is divided between tokens of both parts
            piece = tokenizer.decode(ids[begin:end].tolist(), special=True)
            yield Part(text=piece, scored=bool(scored[begin]))
        elif end > begin:
            yield Part(text=text[len(before) :], scored=bool(scored[begin]))
        before = text


def _first_documents(files: Files, tokenizer: Tokenizer, *, whole: int) -> tuple[int, list[Document]]:
    """Returns the number of records read, and their documents. Of pictures in rows, those of the first
    documents, so many as are `whole`, are kept in memory."""
    documents: list[Document] = []
    for index in range(len(files)):
        if len(documents) >= MOST_DOCUMENTS:
            return index, documents
        for document in _documents(files[index], tokenizer):
            pictures = document.pictures
            if len(documents) >= whole:
                pictures = tuple(picture._replace(data=None) for picture in pictures)
            documents.append(document._replace(pictures=pictures))
    return len(files), documents


def _documents(examples: Sequence[Example | Document], tokenizer: Tokenizer) -> list[Document]:
    if not tokenizer.has_encoder:
        return tokenizer.documents(examples)
    found = []
    for pair in (tokenizer.pair(example) for example in examples if isinstance(example, Example)):
        assert pair.inputs is not None
        ids = np.concatenate([pair.inputs, pair.targets])
        found.append(Document(ids, (np.arange(len(ids)) >= len(pair.inputs)).astype(np.float32)))
    return found


LEAST_BYTES, MOST_BYTES, ENOUGH_SHARDS = 1 << 20, 256 << 20, 64
"""Least and most text in a shard, about; and a number of shards that is enough for any number of processes."""


class Shard(NamedTuple):
    """Records `begin` to `end` of a source, and the name of their file."""

    name: str
    source: int
    begin: int
    end: int


def tokenize(task: Task, out: Path, *, processes: int = 1, progress: Progress = no_progress) -> TokenIndex:
    """Writes the tokens of all sources into a new directory, and returns the content of its tokens.json.

    The directory appears when everything is done, and not before. `progress` is told of the shards.

    Raises:
      FileNotFoundError, InputError: as `open_sources`; also for a model with an encoder, a source of tokens, or an
        `out` that exists.
    """
    section = task.section
    if processes < 1:
        raise InputError(f"processes = {processes} must be at least 1")
    check_target(out, buckets=True)
    if task.config.has_encoder:
        raise InputError("pairs for a model with an encoder are not packed, and cannot be tokenised before training")
    for source in section.sources:
        if source.form == "tokens":
            raise InputError(f"{source.path} is tokenised already")
    identity = tokenizer_identity(task.tokenizer_path, section.chat_template)
    described = dataclasses.asdict(section) | {"tokenizer": None, "chat_template": None, "prefetch": None}
    files = [fingerprint_contents(find_files(source.path)) for source in section.sources]
    job = {"command": "data tokenize", "tokenizer": identity, "data": described, "files": files}
    job |= {"batch_size": task.batch_size, "vocab_size": task.config.vocab_size, "eos": task.config.eos_ids}
    with open_work(out, job) as work:
        shards = list(_shards(open_sources(section, task.config, task.batch_size, task.tokenizer_path)))
        notes = work.notes(shard.name for shard in shards)
        done: dict[str, Any] = {name: note for name, note in notes.items() if (work.folder / name).is_file()}
        todo = [shard for shard in shards if shard.name not in done]
        progress("tokenising", len(done), len(shards))
        for name, about in _tokenized(task, todo, work.folder, processes):
            work.note(name, about)
            done[name] = about
            progress("tokenising", len(done), len(shards))
        fields = {"tokenizer": identity, "bos": section.bos, "eos": section.eos, "vocab_size": task.config.vocab_size}
        index = TokenIndex(**fields, files={shard.name: done[shard.name] for shard in shards})
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(index)}
        for unfinished in work.folder.glob(".*.new"):  # of processes that were killed
            unfinished.unlink()
        work.check_alone()
        (work.folder / INDEX).write_durably(json.dumps(content, indent=2).encode())
        work.complete()
    return index


def source_patterns(out: Path, section: DataSection) -> list[str]:
    """Returns the patterns of the files that the sources become."""
    return [str(out / f"{_stem(number)}-*{SUFFIX}") for number in range(len(section.sources))]


def totals(index: TokenIndex) -> list[Mapping[str, int]]:
    """Returns for every source the sums over its files in tokens.json."""
    sums: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for about in index.files.values():
        sums[about["source"]].update(about)
    return [sums[source] for source in sorted(sums)]


def _stem(source: int) -> str:
    return f"source-{source}"


def _shards(sources: Sequence[Files]) -> Iterator[Shard]:
    for number, source in enumerate(sources):
        needed, useful = -(-source.size // MOST_BYTES), source.size // LEAST_BYTES
        count = max(1, min(len(source), max(needed, min(useful, ENOUGH_SHARDS))))
        for i in range(count):
            name = f"{_stem(number)}-{i:05d}-of-{count:05d}{SUFFIX}"
            yield Shard(name, number, len(source) * i // count, len(source) * (i + 1) // count)


def _tokenized(
    task: Task, shards: Sequence[Shard], folder: Path, processes: int
) -> Iterable[tuple[str, dict[str, int]]]:
    """Writes shards, and yields the name and the description of each as it is done."""
    if processes == 1 or len(shards) < 2:
        _begin(task, folder)
        yield from map(_tokenize, shards)
        return
    with worker_pool(min(processes, len(shards)), _begin_worker, (task, folder)) as executor:
        for future in concurrent.futures.as_completed([executor.submit(_tokenize, shard) for shard in shards]):
            yield future.result()


class _Work(NamedTuple):
    """The files that a process keeps open."""

    sources: list[Files]
    tokenizer: Tokenizer
    folder: Path


_work: _Work | None = None


def _begin_worker(task: Task, folder: Path) -> None:
    # The tokenizer would start a thread for every core itself.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _begin(task, folder)


def _begin(task: Task, folder: Path) -> None:
    global _work
    section = task.section
    sources = open_sources(section, task.config, task.batch_size, task.tokenizer_path)
    tokenizer = Tokenizer(task.tokenizer_path, task.config, bos=section.bos, eos=section.eos)
    _work = _Work(sources, tokenizer, folder)


def _tokenize(shard: Shard) -> tuple[str, dict[str, int]]:
    """Writes one shard; the file gets its name when it is complete. Raises `OSError` if the disk is full."""
    assert _work is not None
    source = _work.sources[shard.source]
    counts = collections.Counter[str]()
    folder = as_path(_work.folder)
    local = folder.local_folder()
    fresh = local.path / f".{shard.name}.{os.getpid()}.new"
    with _record_writer(fresh, folder) as writer:
        for index in range(shard.begin, shard.end):
            documents = _work.tokenizer.documents(source[index])
            if any(document.pictures for document in documents):
                raise InputError(
                    f"{source.where(index)}: pictures are not tokenised in advance; train on the file itself"
                )
            writer.write(pack(documents))
            counts["documents"] += len(documents)
            counts["tokens"] += sum(len(document.ids) for document in documents)
            counts["scored"] += sum(int(document.scored.sum()) for document in documents)
    fresh.replace(local.path / shard.name)
    local.close()
    records = shard.end - shard.begin
    # Shares of the source's bytes add up to all of them.
    before, after = (source.size * edge // max(len(source), 1) for edge in (shard.begin, shard.end))
    counts.update(source=shard.source, records=records, source_bytes=after - before)
    return shard.name, {field.name: counts[field.name] for field in dataclasses.fields(TokenFile)}


@contextlib.contextmanager
def _record_writer(file: Path, folder: StoragePath) -> Iterator[Any]:
    """Yields the writer of a file of records, and raises `OSError` where it says in words that the disk is full."""
    from array_record.python.array_record_module import ArrayRecordWriter

    try:
        # A group is what is read and decompressed at once.
        writer = ArrayRecordWriter(str(file), "group_size:1")
        yield writer
        writer.close()
    except RuntimeError as error:
        explained = folder.storage_error(str(error))
        if explained is None:
            raise
        raise explained from error
