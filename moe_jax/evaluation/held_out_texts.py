"""Reads held-out texts for evaluation, from files of every format that training data may have."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.data.examples import Document, Example
from moe_jax.data.sections import DataSection, SourceSection, input_length
from moe_jax.data.sources.opening import check_form, named_files, open_files, template_loader
from moe_jax.data.tokens.tokenizer import Pair, Tokenizer
from moe_jax.evaluation.held_out_loss import read_text
from moe_jax.files.storage_path import as_path
from moe_jax.models import ModelConfig

HeldOut = np.ndarray | list[Pair]
"""A text as Int32[n] token ids; or rows that are scored one by one."""


def read_held_out(source: SourceSection, data: DataSection, config: ModelConfig, tokenizer_path: Path) -> HeldOut:
    """Reads files as a whole.

    A file of text is one text, without special tokens, unless the source has a separator or names several files.
    Everything else is rows. A pair or conversation is a row, of which the response, or the assistant's messages, are
    scored (for those that are too long, see `Tokenizer.pair`). Other documents are rows of up to `seq_len` tokens, with
    the special tokens that documents have in training, of which every token but the document's first is scored.

    Args:
      source: the files.
      data: lengths of rows, special tokens, and the chat template; its own sources are ignored.
      config: of the model.
      tokenizer_path: a `tokenizer.json`.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: for a file that cannot be read or holds nothing to score, or that a model with an encoder is not
        scored on.
    """
    if not any(character in source.path for character in "*?[") and not as_path(source.path).is_file():
        raise FileNotFoundError(f"no text at {source.path}")
    if config.has_encoder:
        check_form(source, "scored")
    named = named_files(source.path)
    if source.form == "text" and source.separator is None and len(named) == 1:
        ((_, file),) = named
        return read_text(file.path, Tokenizer(tokenizer_path, config), name=source.path)
    tokenizer = Tokenizer(tokenizer_path, config, bos=data.bos, eos=data.eos)
    # A text of any length is one record.
    piece = 1 + max(file.size for _, file in named)
    template = template_loader(data, tokenizer_path)
    files = open_files(source, named, data, config, tokenizer_path, template=template, piece=piece)
    lengths = {"input_len": input_length(data), "seq_len": data.seq_len}
    rows = [row for i in range(len(files)) for example in files[i] for row in _rows(example, tokenizer, **lengths)]
    if not rows:
        raise InputError(f"{source.path} holds no {'pairs' if config.has_encoder else 'documents to score'}")
    return rows


def _rows(example: Example | Document, tokenizer: Tokenizer, *, input_len: int, seq_len: int) -> Iterator[Pair]:
    if isinstance(example, Example):
        if tokenizer.has_encoder or example.is_response or example.spans is not None:
            yield tokenizer.pair(example, input_len=input_len, seq_len=seq_len)
            return
        (example,) = tokenizer.documents([example])
    tokens, targets, scored = example.ids[:-1], example.ids[1:], example.scored[1:]
    if scored.all():
        for start in range(0, len(tokens), seq_len):
            window = slice(start, start + seq_len)
            yield Pair(tokens[window], targets[window], scored[window])
    elif scored[-seq_len:].any():
        end = slice(-seq_len, None)
        yield Pair(tokens[end], targets[end], scored[end], target_was_cut=len(tokens) > seq_len)


def with_lengths(data: DataSection, *, seq_len: int, input_len: int | None = None) -> DataSection:
    """Returns the section with other lengths of rows, and without sources."""
    input_len = input_length(data) if input_len is None else input_len
    return dataclasses.replace(data, sources=(), seq_len=seq_len, input_len=input_len)
