"""Held-out loss: the same measure in training and in `moe-jax eval`."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError
from moe_jax.data.examples import Document, Example
from moe_jax.data.opening import check_form, named_files, open_files, template_loader
from moe_jax.data.sections import DataSection, SourceSection, input_length
from moe_jax.data.tokenizer import Pair, Tokenizer
from moe_jax.distributed.sharding import batch_shards, local_rows, make_mesh, place
from moe_jax.evaluation.forward import Batch, run_to_head
from moe_jax.files.storage_path import as_path
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder


class Evaluation(NamedTuple):
    """How well a model predicts a text.

        >>> moe_jax.evaluate(moe_jax.tiny_model(), [1, 2, 3, 4]).tokens
        3

    Attributes:
      tokens: number of tokens scored.
      nll: mean negative log-likelihood of a scored token, natural log.
      perplexity: exp(nll); inf if that is too large for a float.
      total_nll: sum over the scored tokens.
      windows: number of windows the text was cut into, or of pairs.
      cut: number of pairs that were too long, and were cut.
    """

    tokens: int
    nll: float
    perplexity: float
    total_nll: float
    windows: int
    cut: int = 0


def read_text(path: str | Path, tokenizer: Tokenizer, *, name: str | None = None) -> np.ndarray:
    """Returns the ids, Int32[n], of a whole text file, without special tokens.

    Args:
      path: the file.
      tokenizer: of the model.
      name: name of the file in messages; by default its path.

    Raises:
      FileNotFoundError: no such file.
      InputError: not UTF-8, or fewer than two tokens: nothing could be scored.
    """
    path = as_path(path)
    name = str(path) if name is None else name
    if not path.is_file():
        raise FileNotFoundError(f"no text at {name}")
    try:
        # Decoded from bytes, because reading as text would change line ends.
        ids = tokenizer.encode(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text at byte {error.start}") from None
    if len(ids) < 2:
        raise InputError(f"{name} holds {len(ids)} tokens; scoring takes at least 2, for the first is never scored")
    return ids


class Evaluator:
    """Scores a text in consecutive windows of N tokens: every token of a window but the first.

    The last window may be shorter. Windows are independent of each other.

    Args:
      graphdef: of the model.
      ids: Int32[n], the text, from `read_text`.
      seq_len: N, at least 2.
      batch_size: windows computed at once, rounded up to a multiple of the mesh's batch shards. Affects only the last
        bits of the result.
      mesh: the mesh that the model is on; None: the first device.
    """

    def __init__(
        self, graphdef: nnx.GraphDef, ids: np.ndarray, *, seq_len: int, batch_size: int, mesh: Mesh | None = None
    ):
        check_seq_len(seq_len)
        self._ids = ids
        self._seq_len = min(seq_len, len(ids))
        self._mesh = make_mesh({}, jax.devices()[:1]) if mesh is None else mesh
        shards = batch_shards(self._mesh)
        windows = -(-len(ids) // seq_len)
        self._batch_size = -(-min(batch_size, windows) // shards) * shards
        self._windows = windows

        def row_losses(states: tuple[nnx.State, ...], batch: dict[str, jax.Array]) -> jax.Array:
            model = nnx.merge(graphdef, *states)
            return next_token_row_losses(model, batch)

        self._row_losses = jax.jit(row_losses, out_shardings=NamedSharding(self._mesh, P()))

    def __call__(self, *states: nnx.State) -> Evaluation:
        """Scores the text, given parameters as the states of `nnx.merge(graphdef, *states)`."""
        rows = local_rows(self._mesh, self._batch_size)
        total = 0.0
        with jax.set_mesh(self._mesh):
            for batch in text_windows(self._ids, seq_len=self._seq_len, batch_size=self._batch_size):
                placed = place({key: array[rows] for key, array in batch.items()}, rows, self._mesh, self._batch_size)
                total += float(np.asarray(self._row_losses(states, placed), np.float64).sum())
        tokens = len(self._ids) - self._windows
        nll = total / tokens
        return Evaluation(tokens, nll, exp_or_inf(nll), total, self._windows)


def next_token_row_losses(model: Decoder, batch: Batch) -> Float[Array, " B"]:
    """Returns for every row of `text_windows` the sum of the losses of its tokens but the first."""
    losses = model.token_losses(run_to_head(model, batch).x, jnp.roll(batch["tokens"], -1, axis=1))
    return jnp.sum(losses[:, :-1] * batch["segment_ids"][:, 1:].astype(jnp.float32), axis=1)


def check_seq_len(seq_len: int) -> None:
    """Raises `InputError` for windows so short that nothing could be scored."""
    if seq_len < 2:
        raise InputError(f"seq_len = {seq_len} must be at least 2, for the first token of a window is never scored")


def text_windows(ids: np.ndarray, *, seq_len: int, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of consecutive windows of a text: `tokens` and `segment_ids`, Int32[batch_size, seq_len] both.

    The last batch is filled up with padding, which has segment 0.
    """
    size = batch_size * seq_len
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        tokens, inside = np.zeros(size, np.int32), np.zeros(size, np.int32)
        tokens[: len(chunk)] = chunk
        inside[: len(chunk)] = 1
        shape = (batch_size, seq_len)
        yield {"tokens": tokens.reshape(shape), "segment_ids": inside.reshape(shape)}


def exp_or_inf(value: float) -> float:
    """Returns the exponential, or inf if it is too large for a float."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


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
