"""A preview of the training data: the first documents of every source as tokens, and counts."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moe_jax.data.examples import Document, Example
from moe_jax.data.sections import DataSection, input_length
from moe_jax.data.sources.opening import open_sources
from moe_jax.data.sources.text_files import Files
from moe_jax.data.tokens.tokenizer import Tokenizer
from moe_jax.models import ModelConfig

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
    """Looks at every source of a recipe.

    Args:
      section: its `[data]`.
      config: of the model.
      tokenizer_path: a `tokenizer.json`.
      batch_size: rows of a batch, on which the length of pieces of long texts depends.
      count: documents to show of every source.

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
