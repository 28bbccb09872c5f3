"""The training data of a recipe: files, mixed, shuffled, tokenised and packed into batches (Grain)."""

from collections.abc import Sequence
from pathlib import Path

import grain

from moe_jax.errors import InputError
from moe_jax.models import ModelConfig
from moe_jax.train.recipe import DataSection, SourceSection
from moe_jax.train.sequence_packing import PackedBatches
from moe_jax.train.sources import Files, JsonLines, TextFile, check_beginning, find_files
from moe_jax.train.tokenizer import Pairs, Tokenizer

# Each row of the batch should get at least this many pieces per epoch; otherwise the rows would be nearly equal.
_PIECES_PER_ROW = 8
_SEQUENCES_PER_PIECE = 8


def open_data(
    section: DataSection,
    config: ModelConfig,
    tokenizer_path: Path,
    *,
    seed: int,
    batch_size: int,
    rows: Sequence[int],
) -> grain.DatasetIterator:
    """Opens the files of a recipe as an iterator over batches (see `PackedBatches`).

    The iterator's `get_state()` is JSON-able and `set_state()` continues with the very next batch.

    Args:
      section: the recipe's `[data]`.
      config: the model trained.
      tokenizer_path: a `tokenizer.json`.
      seed: decides the order of the records.
      batch_size: B, rows of the global batch.
      rows: rows of it that this process prepares.

    Raises:
      FileNotFoundError: a path or pattern that matches no file.
      InputError: no sources, a malformed file, or less text than one sequence.
    """
    if not section.sources:
        raise InputError("the recipe has no data: add [[data.sources]] with path = \"...\"")
    tokenizer = Tokenizer(tokenizer_path, config, bos=section.bos, eos=section.eos)
    paths = [find_files(source.path) for source in section.sources]
    sizes = [sum(path.stat().st_size for path in found) for found in paths]
    piece = _piece_bytes(section, sum(sizes), batch_size)
    sources = [
        _open_source(source, found, piece) for source, found in zip(section.sources, paths, strict=True)
    ]
    for source, records in zip(section.sources, sources, strict=True):
        _check_length(source, records, tokenizer, section.seq_len)

    def tokenise(examples: list) -> Pairs:
        return tokenizer.pairs(examples)

    dataset = PackedBatches(
        _ordered(section, sources, sizes, seed).map(tokenise),
        rows=rows,
        num_rows=batch_size,
        seq_len=section.seq_len,
        whole=section.packing == "whole",
        identity={"records": sum(map(len, sources)), "bytes": sum(sizes)},
    )
    if section.prefetch:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=section.prefetch)
    return iter(dataset)


def _open_source(source: SourceSection, paths: Sequence[Path], piece: int) -> Files:
    if source.is_jsonl:
        files = [JsonLines(path) for path in paths]
    else:
        files = [TextFile(path, piece=piece, separator=source.separator) for path in paths]
    check_beginning(files)
    return Files(files)


def _piece_bytes(section: DataSection, total: int, batch_size: int) -> int:
    wanted = total // (_PIECES_PER_ROW * batch_size)
    return min(section.piece_kib * 1024, max(wanted, _SEQUENCES_PER_PIECE * section.seq_len))


def _ordered(section: DataSection, sources: Sequence[Files], sizes: Sequence[int], seed: int) -> grain.MapDataset:
    datasets = [grain.MapDataset.source(source) for source in sources]
    weights = [source.weight for source in section.sources if source.weight is not None]
    if len(weights) < len(section.sources):
        merged = grain.MapDataset.concatenate(datasets)
        return (merged.shuffle(seed) if section.shuffle else merged).repeat(section.epochs)
    if section.shuffle:
        datasets = [dataset.shuffle(seed) for dataset in datasets]
    # Records of different sources differ in length; weights are shares of text, not of records.
    records_per_byte = [len(source) / size for source, size in zip(sources, sizes, strict=True)]
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
    raise InputError(
        f"{source.path} is too short: {count + documents} tokens in {documents} documents do not fill one sequence of "
        f"data.seq_len = {seq_len} (and the token after it); give more text or a smaller data.seq_len"
    )
