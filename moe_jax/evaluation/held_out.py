"""A model on held-out data, run as in training: losses of texts in windows and of pairs, and statistics of routers."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt8

from moe_jax.core.bad_documents import STOP, BadDocument, Skipped, naming
from moe_jax.core.errors import InputError
from moe_jax.data.file_forms import check_is_text
from moe_jax.data.pictures.picture_loading import PictureLoader, picture_loader
from moe_jax.data.rows import Example
from moe_jax.data.sections import DataSection, SourceSection, check_seq_len, input_length
from moe_jax.data.sources import check_form, named_files, open_files, template_loader
from moe_jax.data.tokenizer import Document, Pair, Tokenizer
from moe_jax.distributed.sharding import batch_shards, local_rows, make_mesh, place
from moe_jax.files.storage_path import as_path, raise_no_file
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder
from moe_jax.nn.inputs import Batch, model_inputs
from moe_jax.nn.moe import RouterStatistics, RouterSums, StackedStats, stats_per_layer
from moe_jax.nn.stack import StackOutput


def run_to_head(model: Decoder, batch: Batch, key: jax.Array | None = None) -> StackOutput:
    """Returns the activations that the head takes, for a batch.

    `Decoder.token_losses` and `Decoder.weighted_loss` compute losses from them without the logits of all tokens at
    once.
    """
    return model.activations(**model_inputs(batch), key=key)


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
      skipped: number of bad documents that were left out.
      problems: where the first of these are, and what is wrong with them.
    """

    tokens: int
    nll: float
    perplexity: float
    total_nll: float
    windows: int
    cut: int = 0
    skipped: int = 0
    problems: tuple[str, ...] = ()


HeldOut = np.ndarray | list[Pair]
"""A text as Int32[n] token ids; or rows that are scored one by one."""


class Evaluator:
    """Scores a text in consecutive windows of N tokens, every token but the first; or the targets of pairs.

    The last window may be shorter. Windows are independent of each other. In pairs each token of a target is predicted
    from the input and the tokens before it.

    Args:
      held_out: Int32[n], the text, from `read_text`; or at least one pair, as `Tokenizer.pair` makes them.
      seq_len: N, at least 2; of a text.
      batch_size: windows or pairs computed at once, rounded up to a multiple of the mesh's batch shards. Affects only
        the last bits of the result.
      mesh: the mesh that the model is on; None: the first device.
    """

    def __init__(
        self, graphdef: nnx.GraphDef, held_out: HeldOut, *, seq_len: int = 0, batch_size: int, mesh: Mesh | None = None
    ):
        mesh = make_mesh({}, jax.devices()[:1]) if mesh is None else mesh
        self._cut = 0
        if isinstance(held_out, list):
            on_mesh = {"graphdef": graphdef, "batch_size": batch_size, "mesh": mesh}
            self._tokens, self._windows = int(sum(pair.weights.sum() for pair in held_out)), len(held_out)
            self._cut = sum(pair.input_was_cut or pair.target_was_cut for pair in held_out)
            if not self._tokens:
                raise InputError(f"no token of {len(held_out):,} pairs is scored: there is nothing to measure")
            self._sums = lambda states: [score_rows(target_losses, held_out, states=states, **on_mesh).sum()]
            return

        def row_losses(states: tuple[nnx.State, ...], batch: Batch) -> jax.Array:
            return next_token_row_losses(nnx.merge(graphdef, *states), batch)

        windows = _Windows(row_losses, held_out, seq_len=seq_len, batch_size=batch_size, mesh=mesh)
        self._tokens, self._windows = len(held_out) - windows.count, windows.count
        self._sums = lambda states: (np.asarray(losses, np.float64).sum() for _, losses in windows(states))

    def __call__(self, *states: nnx.State) -> Evaluation:
        """Scores the data, given parameters as the states of `nnx.merge(graphdef, *states)`."""
        total = sum(map(float, self._sums(states)), 0.0)
        nll = total / self._tokens
        try:
            perplexity = math.exp(nll)
        except OverflowError:
            perplexity = math.inf
        return Evaluation(self._tokens, nll, perplexity, total, self._windows, self._cut)


class _Windows:
    """Runs a function on the windows of a text, `batch_size` at once.

    Attributes:
      count: number of windows.
    """

    def __init__(
        self, compute: Callable[[Any, Batch], Any], ids: np.ndarray, *, seq_len: int, batch_size: int, mesh: Mesh
    ):
        check_seq_len(seq_len)
        self.count = -(-len(ids) // seq_len)
        self._ids, self._seq_len, self._mesh = ids, min(seq_len, len(ids)), mesh
        self._size = _rounded_up(min(batch_size, self.count), mesh)
        self._compute = jax.jit(compute, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, state: Any) -> Iterator[tuple[int, Any]]:
        """Yields for every batch the number of its tokens, and the result of the function of `state` and the batch."""
        with jax.set_mesh(self._mesh):
            for batch in text_windows(self._ids, seq_len=self._seq_len, batch_size=self._size):
                tokens = int(batch["segment_ids"].sum())
                yield tokens, self._compute(state, _placed(batch, self._mesh, self._size))


def next_token_row_losses(model: Decoder, batch: Batch) -> Float[Array, " B"]:
    """Returns for every row of `text_windows` the sum of the losses of its tokens but the first."""
    losses = model.token_losses(run_to_head(model, batch).x, jnp.roll(batch["tokens"], -1, axis=1))
    return jnp.sum(losses[:, :-1] * batch["segment_ids"][:, 1:].astype(jnp.float32), axis=1)


def text_windows(ids: np.ndarray, *, seq_len: int, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of consecutive windows of a text: `tokens` and `segment_ids`, Int32[batch_size, seq_len] both.

    The last batch is filled up with padding, which has segment 0.
    """
    size, shape = batch_size * seq_len, (batch_size, seq_len)
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        tokens, inside = np.zeros((2, size), np.int32)
        tokens[: len(chunk)], inside[: len(chunk)] = chunk, 1
        yield {"tokens": tokens.reshape(shape), "segment_ids": inside.reshape(shape)}


def _rounded_up(rows: int, mesh: Mesh) -> int:
    """Returns the next multiple of the mesh's batch shards."""
    shards = batch_shards(mesh.shape)
    return -(-rows // shards) * shards


def _placed(batch: dict[str, np.ndarray], mesh: Mesh, size: int) -> dict[str, jax.Array]:
    rows = local_rows(mesh, size)
    return place({name: array[rows] for name, array in batch.items()}, rows, mesh, size)


RowScore = Callable[[nnx.GraphDef, tuple[nnx.State, ...], Batch], jax.Array]
# Pairs are padded to a power of two of tokens, at least this: few programs for pairs of all lengths.
_SHORTEST = 16


def score_rows(
    score: RowScore,
    pairs: Sequence[Pair],
    *,
    graphdef: nnx.GraphDef,
    states: tuple[nnx.State, ...],
    batch_size: int,
    mesh: Mesh | None = None,
) -> Float[np.ndarray, "n ..."]:
    """Returns the score of each of many rows, float64; they are padded and batched with others of similar length.

    `score` is a function of this library, `score(graphdef, states, batch) -> [B, ...]`; for the rest see `Evaluator`.
    """
    # Imported here because it imports Grain, which commands that evaluate nothing should not load.
    from moe_jax.data.packing import stack_pairs

    mesh = make_mesh({}, jax.devices()[:1]) if mesh is None else mesh
    size = _rounded_up(min(batch_size, len(pairs)), mesh)
    compute = _compiled(score, graphdef, mesh)
    groups: dict[tuple[int, int | None, int], list[int]] = {}
    for index, pair in enumerate(pairs):
        input_len = None if pair.inputs is None else _padded(len(pair.inputs))
        groups.setdefault((_padded(len(pair.tokens)), input_len, pair.pictures), []).append(index)
    found: dict[int, np.ndarray] = {}
    with jax.set_mesh(mesh):
        for (seq_len, input_len, _), indices in groups.items():
            for start in range(0, len(indices), size):
                chunk = indices[start : start + size]
                batch = stack_pairs([pairs[index] for index in chunk], size, input_len=input_len, seq_len=seq_len)
                scores = np.asarray(compute(states, _placed(batch, mesh, size)), np.float64)
                found |= {index: scores[row] for row, index in enumerate(chunk)}
    return np.stack([found[index] for index in range(len(pairs))])


def target_losses(graphdef: nnx.GraphDef, states: tuple[nnx.State, ...], batch: Batch) -> Float[Array, " B"]:
    """Returns the negative log-likelihood of every pair's target for `score_rows`."""
    model = nnx.merge(graphdef, *states)
    losses = model.token_losses(run_to_head(model, batch).x, batch["targets"])
    return jnp.sum(losses * batch["weights"], axis=1)


@functools.lru_cache(maxsize=16)
def _compiled(score: RowScore, graphdef: nnx.GraphDef, mesh: Mesh) -> Callable[..., jax.Array]:
    """Compiled once for all files that a model is evaluated on."""
    return jax.jit(functools.partial(score, graphdef), out_shardings=NamedSharding(mesh, P()))


def _padded(length: int) -> int:
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def measure_router_statistics(
    model: Decoder, ids: np.ndarray, *, seq_len: int, batch_size: int, mesh: Mesh
) -> dict[int, RouterStatistics]:
    """Runs a model with MoE layers on a text, Int32[n], cut into windows as in `Evaluator`.

    Returns router statistics by layer index: shares, mean probabilities and similarities of logits. `batch_size` does
    not affect them. Raises `InputError` if `seq_len` is too small.
    """
    check_seq_len(seq_len)
    model.config.check_no_encoder("counting how experts are used on a text")
    graphdef, state = nnx.split(model)

    def router(state: nnx.State, batch: Batch) -> StackedStats:
        return nnx.merge(graphdef, state)(batch["tokens"], segment_ids=batch["segment_ids"]).router

    windows = _Windows(router, ids, seq_len=seq_len, batch_size=batch_size, mesh=mesh)
    sums: dict[int, RouterSums] = {}
    for tokens, stats in windows(state):
        for layer, found in stats_per_layer(model.config, stats).items():
            sums.setdefault(layer, RouterSums()).add(found, tokens)
    return {layer: total.statistics() for layer, total in sums.items()}


def read_text(path: str | Path, tokenizer: Tokenizer, *, name: str | None = None, is_told: bool = False) -> np.ndarray:
    """Returns the ids, Int32[n], of a whole text file, without special tokens; `name` is the file's in messages.

    Raises:
      FileNotFoundError: no such file.
      InputError: not UTF-8, or fewer than two tokens: nothing could be scored.
    """
    path = as_path(path)
    name = str(path) if name is None else name
    if not path.is_file():
        raise_no_file("text", name)
    content = path.read_bytes()
    if not is_told:
        check_is_text(name, content)
    try:
        # Decoded from bytes, because reading as text would change line ends.
        ids = tokenizer.encode(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text at byte {error.start}") from None
    if len(ids) < 2:
        raise InputError(f"{name} holds {len(ids)} tokens; scoring takes at least 2, for the first is never scored")
    return ids


def read_held_out(
    source: SourceSection,
    data: DataSection,
    config: ModelConfig,
    tokenizer_path: Path,
    skipped: Skipped = STOP,
) -> HeldOut:
    """Reads files as a whole.

    A file of text is one text, without special tokens, unless the source has a separator or names several files.
    Everything else is rows. A pair or conversation is a row, of which the response, or the assistant's messages, are
    scored (for those that are too long, see `Tokenizer.pair`). Other documents are rows of up to `seq_len` tokens, with
    the special tokens that documents have in training, of which every token but the document's first is scored. `data`
    has lengths of rows, special tokens, and the chat template; its own sources are ignored. `skipped` decides about bad
    documents, and counts them; None: the first ends it.

    Raises:
      FileNotFoundError: if there is no such file.
      BadDocument: for a row that cannot be scored, with its place, unless it is skipped.
      InputError: for a file that cannot be read or holds nothing to score, or that a model with an encoder is not
        scored on.
    """
    if not any(character in source.path for character in "*?[") and not as_path(source.path).is_file():
        raise_no_file("text", source.path)
    if config.has_encoder:
        check_form(source, "scored")
    named = named_files(source.path)
    if source.form == "text" and source.separator is None and len(named) == 1:
        ((_, file),) = named
        of_text = Tokenizer(tokenizer_path, config)
        return read_text(file.path, of_text, name=source.path, is_told=source.format == "text")
    tokenizer = Tokenizer(tokenizer_path, config, bos=data.bos, eos=data.eos)
    # A text of any length is one record.
    piece = 1 + max(file.size for _, file in named)
    template = template_loader(data, tokenizer_path)
    rows = list[Pair]()
    files = open_files(
        source, named, data, config, tokenizer_path, template=template, piece=piece, checks=not skipped.skips
    )
    lengths = {"input_len": input_length(data), "seq_len": data.seq_len}
    load = None if config.vision is None else picture_loader(data, config, on_bad="stop")
    for index in range(len(files)):
        with skipped.passed_over():
            examples = files[index]
            with naming(files.where(index)):
                made = [row for example in examples for row in rows_of(example, tokenizer, load, **lengths)]
            for example in examples:
                if load is not None:
                    load.check(example.pictures)
            for row in made:
                if skipped.skips and row.pixels is not None:
                    row.pixels()  # to find out now that they can be read
            rows += made
    skipped.check_any_left(len(rows), source.path)
    if not rows:
        raise InputError(f"{source.path} holds no {'pairs' if config.has_encoder else 'documents to score'}")
    return rows


def rows_of(
    example: Example | Document, tokenizer: Tokenizer, load: PictureLoader | None, *, input_len: int, seq_len: int
) -> Iterator[Pair]:
    """Yields the rows of a document, see `read_held_out`; `load` reads the pictures of a model that takes some."""
    if isinstance(example, Example) and example.pictures:
        assert load is not None, "the model takes pictures"
        yield _seen(tokenizer.documents([example])[0], load, seq_len)
        return
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
    elif scored.any():
        end = slice(-seq_len, None)
        yield Pair(tokens[end], targets[end], scored[end], target_was_cut=len(tokens) > seq_len)


def _seen(document: Document, load: PictureLoader, seq_len: int) -> Pair:
    """Returns a document with pictures as a pair, without the end of one that is too long."""
    assert document.slots is not None
    part, count = slice(0, seq_len), len(document.pictures)
    slots, weights = document.slots[:-1][part], document.scored[1:][part]
    if document.slots.max() > slots.max() or not weights.any():
        raise BadDocument(f"its pictures and question leave no room for an answer in {seq_len} tokens")

    def pixels() -> UInt8[np.ndarray, "m H W 3"]:
        loaded = [one.pixels for one in load([document])[1]]
        return np.stack([one for one in loaded if one is not None])

    cut = len(document.ids) - 1 > seq_len
    return Pair(
        document.ids[:-1][part],
        document.ids[1:][part],
        weights,
        target_was_cut=cut,
        slots=slots,
        pictures=count,
        pixels=pixels,
    )


def with_lengths(data: DataSection, *, seq_len: int, input_len: int | None = None) -> DataSection:
    """Returns the section with other lengths of rows, and without sources."""
    input_len = input_length(data) if input_len is None else input_len
    return dataclasses.replace(data, sources=(), seq_len=seq_len, input_len=input_len)
