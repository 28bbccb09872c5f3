"""The training data of a recipe: files, mixed, shuffled, tokenised and made into batches (Grain)."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain

from moe_jax.core.errors import InputError
from moe_jax.data.examples import Example
from moe_jax.data.pair_batches import PairBatches
from moe_jax.data.sections import DataSection, SourceSection, input_length
from moe_jax.data.sequence_packing import PackedBatches
from moe_jax.data.sources.opening import open_sources
from moe_jax.data.sources.text_files import Files
from moe_jax.data.tokens.tokenizer import Pair, Pairs, Tokenizer
from moe_jax.files.storage_path import as_path
from moe_jax.models import ModelConfig

PairMaker = Callable[[list[Example]], list[Pair]]

# Number of pairs of every source that are read before training, to count those that are too long.
_PAIRS_LOOKED_AT = 1000


def open_data(
    section: DataSection,
    config: ModelConfig,
    tokenizer_path: Path,
    *,
    seed: int,
    batch_size: int,
    rows: Sequence[int],
    note: Callable[[str], object] = lambda line: None,
) -> grain.DatasetIterator:
    """Opens the files of a recipe as an iterator over batches: `PackedBatches`, or `PairBatches` for an encoder.

    The iterator's `get_state()` is JSON-able and `set_state()` continues with the very next batch.

    Args:
      section: the recipe's `[data]`.
      config: the model trained.
      tokenizer_path: a `tokenizer.json`.
      seed: decides the order of the records.
      batch_size: B, rows of the global batch.
      rows: rows of it that this process prepares.
      note: called with remarks on the data, a line each.

    Raises:
      FileNotFoundError: a path or pattern that matches no file.
      InputError: no sources, a malformed file, less text than one sequence, or texts for a model with an encoder.
    """
    sources = open_sources(section, config, batch_size, tokenizer_path)
    sizes = [source.size for source in sources]
    tokenizer = Tokenizer(tokenizer_path, config, bos=section.bos, eos=section.eos)
    given: dict[str, Any] = dict(
        rows=rows,
        num_rows=batch_size,
        seq_len=section.seq_len,
        identity={"records": sum(map(len, sources)), "bytes": sum(sizes)},
        at_once=max(as_path(source.path).at_once for source in section.sources),
    )
    records = _ordered(section, sources, sizes, seed)
    if config.has_encoder:
        make_pairs = _pair_maker(section, tokenizer)
        cuts = _describe_cuts(section, sources, make_pairs)
        if cuts is not None:
            note(cuts)
        dataset = PairBatches(records.map(make_pairs), input_len=input_length(section), **given)
    else:
        for source, found in zip(section.sources, sources, strict=True):
            _check_length(source, found, tokenizer, section.seq_len)

        def tokenise(examples: list) -> Pairs:
            return tokenizer.pairs(examples)

        dataset = PackedBatches(records.map(tokenise), whole=section.packing == "whole", **given)
    if section.prefetch:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=section.prefetch)
    return iter(dataset)


def _describe_cuts(
    section: DataSection, sources: Sequence[Files], make_pairs: Callable[[Any], list[Pair]]
) -> str | None:
    """Returns a sentence on how many of the first pairs of every source are too long for the recipe; None if none is.

    Raises:
      InputError: for a source without pairs.
    """
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


def _pair_maker(section: DataSection, tokenizer: Tokenizer) -> PairMaker:
    lengths = {"input_len": input_length(section), "seq_len": section.seq_len}

    def make(examples: list[Example]) -> list[Pair]:
        return [tokenizer.pair(example, **lengths) for example in examples]

    return make


def _ordered(section: DataSection, sources: Sequence[Files], sizes: Sequence[int], seed: int) -> grain.MapDataset:
    datasets = [grain.MapDataset.source(source) for source in sources]
    weights = [source.weight for source in section.sources if source.weight is not None]
    if len(weights) < len(section.sources):
        merged = grain.MapDataset.concatenate(datasets)
        return (merged.shuffle(seed) if section.shuffle else merged).repeat(section.epochs)
    if section.shuffle:
        datasets = [dataset.shuffle(seed) for dataset in datasets]
    # Records of different sources differ in length; weights are shares of text, not of records.
    records_per_byte = [len(source) / max(size, 1) for source, size in zip(sources, sizes, strict=True)]
    return grain.MapDataset.mix(
        [dataset.repeat(section.epochs) for dataset in datasets],
        weights=[weight * density for weight, density in zip(weights, records_per_byte, strict=True)],
    )


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
