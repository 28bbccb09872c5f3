"""The training data of a recipe: files, mixed, shuffled, tokenised and made into batches (Grain).

Row r of the global batch reads the records r, r + B, r + 2B, ... in turn. The content of a row therefore does not
depend on the number of processes, each process prepares only its own rows, and the position of the data is one (record,
offset) per row.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.data.packing import Batch, PackedRow, PairRow, PictureRoom, Row, SeenPairs, check_room, fitted
from moe_jax.data.pictures.picture_loading import KnownFeatures, picture_loader
from moe_jax.data.rows import Example
from moe_jax.data.sections import DataSection, SourceSection, input_length
from moe_jax.data.sources import Files, open_sources
from moe_jax.data.tokenizer import Document, Pair, Tokenizer, pairs_of
from moe_jax.files.storage_path import as_path
from moe_jax.models import ModelConfig


class RowBatches(grain.IterDataset):
    """An endless iterator over batches of rows that are filled one by one; after the last record, all is padding.

    Its position consists of those of the rows; one that belongs to data with another `identity` is refused. If records
    have to be waited for, so many rows are filled `at_once`.
    """

    def __init__(self, rows: Callable[[], Sequence[Row]], *, identity: Mapping[str, int], at_once: int = 1):
        super().__init__()
        self._make = lambda: _RowsIterator(rows(), dict(identity), at_once)

    def __iter__(self) -> grain.DatasetIterator:
        return self._make()


class _RowsIterator(grain.DatasetIterator):
    def __init__(self, rows: Sequence[Row], identity: dict[str, int], at_once: int):
        super().__init__()
        self._rows, self._identity = rows, identity
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="rows") if at_once > 1 else None

    def __next__(self) -> Batch:
        run = map if self._pool is None else self._pool.map
        filled = list(run(lambda row: row.fill(), self._rows))
        return {key: np.stack([row[key] for row in filled]) for key in filled[0]}

    def get_state(self) -> dict[str, Any]:
        return {"identity": self._identity, "rows": {str(row.number): [row.record, row.offset] for row in self._rows}}

    def set_state(self, state: dict[str, Any]) -> None:
        if "blocks" in self._identity and "blocks" not in state["identity"]:
            raise InputError(
                "this position belongs to an older order of sources with weights, which is not made any more; go on "
                "with the version that the run began with, or start a new run"
            )
        if state["identity"] != self._identity:
            raise InputError(
                f"the training data changed: this position belongs to {state['identity']}, the files now make "
                f"{self._identity}; put the old files back or start a new run"
            )
        for row in self._rows:
            row.seek(*state["rows"][str(row.number)])


# Number of pairs of every source that are read before training, to count those that are too long; and of records, to
# find out whether they have pictures.
_PAIRS_LOOKED_AT = 1000
# Share of a row that pictures take, from which the room for them follows.
_SEEN = 3 / 4


def open_data(
    section: DataSection,
    config: ModelConfig,
    tokenizer_path: Path,
    *,
    seed: int,
    batch_size: int,
    rows: Sequence[int],
    note: Callable[[str], object] = lambda line: None,
    known: KnownFeatures | None = None,
) -> grain.DatasetIterator:
    """Opens the files of a recipe as an iterator over batches: of `PackedRow`, or of `PairRow` for an encoder.

    The iterator's `get_state()` is JSON-able and `set_state()` continues with the very next batch.

    Args:
      config: of the model trained.
      seed: decides the order of the records.
      batch_size: B, rows of the global batch.
      rows: rows of it that this process prepares.
      note: called with remarks on the data, a line each.
      known: features of pictures whose pixels are then not made; None: none are, and batches have no features.

    Raises:
      FileNotFoundError: a path or pattern that matches no file, or a folder of pictures that is not there.
      InputError: no sources, a malformed file, less text than one sequence, texts for a model with an encoder, or a
        picture that takes more tokens than a row has.
    """
    sources = open_sources(section, config, batch_size, tokenizer_path)
    sizes = [source.size for source in sources]
    tokenizer = Tokenizer(tokenizer_path, config, bos=section.bos, eos=section.eos)
    records, at_once = _ordered(section, sources, sizes, seed=seed, batch_size=batch_size), 1
    identity = {"records": sum(map(len, sources)), "bytes": sum(sizes)}
    if _weights(section):
        identity["blocks"] = batch_size
        _say_what_ends(section, sizes, note)
    if config.has_encoder:
        lengths = {"input_len": input_length(section), "seq_len": section.seq_len}

        def make_pairs(examples: list[Example]) -> list[Pair]:
            return [tokenizer.pair(example, **lengths) for example in examples]

        cuts = _describe_cuts(section, sources, make_pairs)
        if cuts is not None:
            note(cuts)
        make = partial(PairRow, records.map(make_pairs), stride=batch_size, **lengths)
    else:
        for source, found in zip(section.sources, sources, strict=True):
            _check_length(source, found, tokenizer, section.seq_len)
        room = picture_room(section, config, sources, tokenizer.per_picture, known)
        load = None if room is None else picture_loader(section, config, known=known, note=note)

        def tokenise(examples: Sequence[Example | Document]) -> SeenPairs:
            documents = [fitted(one, room, section.seq_len) for one in tokenizer.documents(examples)]
            kept, pictures = (documents, []) if load is None else load(documents)
            return SeenPairs(pairs_of(kept, tokenizer.per_picture), pictures)

        packing = {"seq_len": section.seq_len, "whole": section.packing == "whole", "room": room}
        make = partial(PackedRow, records.map(tokenise), stride=batch_size, **packing)
        # Decoders of pictures run beside each other.
        at_once = 1 if room is None else os.cpu_count() or 1
    dataset: grain.IterDataset = RowBatches(
        lambda: [make(row) for row in rows],
        identity=identity,
        at_once=max(at_once, *(as_path(source.path).at_once for source in section.sources)),
    )
    if section.prefetch:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=section.prefetch)
    return iter(dataset)


def picture_room(
    section: DataSection,
    config: ModelConfig,
    sources: Sequence[Files],
    per_picture: int,
    known: KnownFeatures | None = None,
) -> PictureRoom | None:
    """Returns the room for pictures in every row; None: the first records of no source have any.

    Raises:
      InputError: if a picture takes more tokens than a row has, or the recipe is about pictures, and the model takes
        none.
    """
    vision = config.vision
    if vision is None:
        for name in ("image_folder", "image_aspect", "max_pictures", "feature_cache", "pixel_cache"):
            if getattr(section, name) is not None:
                config.check_sees(f"data.{name}")
        return None
    if section.max_pictures is None and not any(map(_has_pictures, sources)):
        return None
    if per_picture > section.seq_len:
        raise InputError(
            f"a picture takes {per_picture} tokens, more than data.seq_len = {section.seq_len}; give a larger seq_len"
        )
    count = section.max_pictures
    if count is None:
        count = max(1, int(section.seq_len * _SEEN) // per_picture)
    check_room(count, per_picture, section.seq_len)
    return PictureRoom(
        count,
        vision.processing.size,
        per_picture,
        None if known is None else known.shape,
        np.dtype(np.float32) if known is None else known.dtype,
    )


def _has_pictures(source: Files) -> bool:
    """Whether an example of the first records has a picture."""
    first = itertools.chain.from_iterable(source[index] for index in range(min(len(source), _PAIRS_LOOKED_AT)))
    return any(example.pictures for example in first)


def _describe_cuts(
    section: DataSection, sources: Sequence[Files], make_pairs: Callable[[Any], list[Pair]]
) -> str | None:
    """Returns a sentence on how many of the first pairs of every source are too long; None if none is."""
    pairs = []
    for settings, source in zip(section.sources, sources, strict=True):
        first = (pair for index in range(len(source)) for pair in make_pairs(source[index]))
        found = list(itertools.islice(first, _PAIRS_LOOKED_AT))
        if not found:
            raise InputError(f"{settings.path} holds no pairs")
        pairs += found
    inputs, targets = sum(pair.input_was_cut for pair in pairs), sum(pair.target_was_cut for pair in pairs)
    if not inputs and not targets:
        return None
    return (
        f"of the first {len(pairs):,} pairs, {inputs:,} inputs are longer than data.input_len = "
        f"{input_length(section)} and {targets:,} targets than data.seq_len = {section.seq_len}: their ends are left "
        "out (metrics.jsonl: cut_inputs, cut_targets)"
    )


def _weights(section: DataSection) -> list[float]:
    """Returns the weights of all sources; none if sources count by their size."""
    return [source.weight for source in section.sources if source.weight is not None]


def _say_what_ends(section: DataSection, sizes: Sequence[int], note: Callable[[str], object]) -> None:
    """Says which source with a weight ends the training, where others are not read as often by then."""
    passes = [size / weight for size, weight in zip(sizes, _weights(section), strict=True)]
    first = section.sources[passes.index(min(passes))].path
    if section.epochs is not None and max(passes) > 1.01 * min(passes):
        note(f"data.epochs = {section.epochs} ends with {first}: by its weight it is used up before the other sources")


class _InBlocks(grain.MapDataset):
    """Records in an order of its own within every block of `size`; the last block, if it is not full, stays as it is.

    A mixture is periodic, and a row of the batch reads every B-th record: where both periods beat, rows would read one
    source only, and as each takes as many tokens as the others, not records, weights would not be kept.
    """

    def __init__(self, parent: grain.MapDataset, *, size: int, seed: int):
        super().__init__(parent)
        self._records, self._size, self._seed = parent, size, seed

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        block, place = divmod(index, self._size)
        if (block + 1) * self._size > len(self):
            return self._records[index]
        # Raw numbers of a bit generator are the same in every version of NumPy: a run may go on with another one.
        numbers = np.random.Philox(key=[self._seed, block]).random_raw(self._size)
        return self._records[block * self._size + int(np.argsort(numbers, kind="stable")[place])]


def _ordered(
    section: DataSection, sources: Sequence[Files], sizes: Sequence[int], *, seed: int, batch_size: int
) -> grain.MapDataset:
    datasets = [grain.MapDataset.source(source) for source in sources]
    weights = _weights(section)
    if not weights:
        merged = grain.MapDataset.concatenate(datasets)
        return (merged.shuffle(seed) if section.shuffle else merged).repeat(section.epochs)
    if section.shuffle:
        datasets = [dataset.shuffle(seed) for dataset in datasets]
    # Records of different sources differ in length; weights are shares of text, not of records.
    records_per_byte = [len(source) / max(size, 1) for source, size in zip(sources, sizes, strict=True)]
    mixed = grain.MapDataset.mix(
        [dataset.repeat(section.epochs) for dataset in datasets],
        weights=[weight * density for weight, density in zip(weights, records_per_byte, strict=True)],
    )
    return _InBlocks(mixed, size=batch_size, seed=seed)


def _check_length(source: SourceSection, records: Files, tokenizer: Tokenizer, seq_len: int) -> None:
    """Raises `InputError` unless there is text for one sequence; reads no more than necessary to decide."""
    count = documents = 0
    for index in range(len(records)):
        pairs = tokenizer.pairs(records[index])
        count += len(pairs.tokens)
        documents += int(pairs.starts.sum())
        if count >= seq_len:
            return
    if not documents:
        raise InputError(f"{source.path} holds no text")
    raise InputError(
        f"{source.path} is too short: {count + documents} tokens in {documents} documents do not fill one sequence of "
        f"data.seq_len = {seq_len} (and the token after it); give more text or a smaller data.seq_len"
    )
