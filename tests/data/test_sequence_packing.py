"""Packing: every pair once and in order, segments and positions right, and any position resumable."""

import functools
import itertools
import json

import grain
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.data.packing import PackedRow, SeenPairs
from moe_jax.data.pipeline import RowBatches
from moe_jax.data.tokenizer import Pairs

KEYS = ("tokens", "targets", "weights", "segment_ids", "positions")


def make_records(lengths: list[list[int]]) -> tuple[list[Pairs], list[np.ndarray]]:
    """Records of documents of the given numbers of tokens, every token a different number."""
    counter = itertools.count(1)
    records, documents = [], []
    for record in lengths:
        ids = [np.array([next(counter) for _ in range(n)], np.int32) for n in record]
        documents += ids
        if not ids:
            ids = [np.zeros(1, np.int32)]
        pairs = Pairs(
            np.concatenate([d[:-1] for d in ids]),
            np.concatenate([d[1:] for d in ids]),
            np.concatenate([np.ones(len(d) - 1, np.float32) for d in ids]),
            np.concatenate([np.arange(len(d) - 1) == 0 for d in ids]),
            np.concatenate([np.zeros(len(d) - 1, np.int32) for d in ids]),
        )
        records.append(SeenPairs(pairs))
    return records, documents


def batches_of(records, *, num_rows, seq_len, whole, rows=None):
    numbers, dataset = range(num_rows) if rows is None else rows, grain.MapDataset.source(records)
    make = functools.partial(PackedRow, dataset, stride=num_rows, seq_len=seq_len, whole=whole)
    return iter(RowBatches(lambda: list(map(make, numbers)), identity={}))


def read_all(iterator) -> list[dict[str, np.ndarray]]:
    batches = []
    while (batch := next(iterator))["segment_ids"].any():
        batches.append(batch)
    return batches


lengths = st.lists(st.lists(st.integers(2, 14), max_size=4), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_every_pair_appears_exactly_once_in_the_order_of_its_document(lengths, num_rows, seq_len, whole):
    records, documents = make_records(lengths)
    batches = read_all(batches_of(records, num_rows=num_rows, seq_len=seq_len, whole=whole))
    seen = []
    for row in range(num_rows):
        for batch in batches:
            real = batch["segment_ids"][row] > 0
            seen += zip(batch["tokens"][row][real].tolist(), batch["targets"][row][real].tolist(), strict=True)
            assert (batch["weights"][row] == real).all()
    expected = [pair for document in documents for pair in itertools.pairwise(document.tolist())]
    assert sorted(seen) == sorted(expected)
    assert len(set(seen)) == len(seen)


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 9), st.booleans())
def test_segments_are_the_documents_and_positions_count_from_their_beginning(lengths, seq_len, whole):
    records, documents = make_records(lengths)
    document_of = {token: i for i, document in enumerate(documents) for token in document.tolist()}
    size_of = [len(document) - 1 for document in documents]
    for batch in read_all(batches_of(records, num_rows=1, seq_len=seq_len, whole=whole)):
        segments, tokens, positions = (batch[key][0] for key in ("segment_ids", "tokens", "positions"))
        count = int((segments > 0).sum())
        assert (segments[:count] > 0).all() and not segments[count:].any()
        for t in range(count):
            same = t > 0 and document_of[int(tokens[t])] == document_of[int(tokens[t - 1])]
            assert segments[t] == (1 if t == 0 else segments[t - 1] + (not same))
            assert positions[t] == (positions[t - 1] + 1 if same else 0)
            if whole and size_of[document_of[int(tokens[t])]] <= seq_len:
                assert int((segments == segments[t]).sum()) == size_of[document_of[int(tokens[t])]]


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 3), st.integers(2, 9), st.booleans(), st.integers(0, 12))
def test_the_stream_continues_from_any_position(lengths, num_rows, seq_len, whole, stop):
    records, _ = make_records(lengths)
    kwargs = dict(num_rows=num_rows, seq_len=seq_len, whole=whole)
    iterator = batches_of(records, **kwargs)
    for _ in range(stop):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = batches_of(records, **kwargs)
    resumed.set_state(state)
    for _ in range(4):
        expected, got = next(iterator), next(resumed)
        for key in KEYS:
            np.testing.assert_array_equal(expected[key], got[key])


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(2, 9))
def test_rows_do_not_depend_on_who_prepares_them(lengths, seq_len):
    records, _ = make_records(lengths)
    together = read_all(batches_of(records, num_rows=4, seq_len=seq_len, whole=False))
    apart = [batches_of(records, num_rows=4, seq_len=seq_len, whole=False, rows=rows) for rows in ([0, 3], [1, 2])]
    for batch in together:
        first, second = next(apart[0]), next(apart[1])
        for key in KEYS:
            np.testing.assert_array_equal(batch[key][[0, 3]], first[key])
            np.testing.assert_array_equal(batch[key][[1, 2]], second[key])


def test_a_document_that_just_fits_stays_in_its_row():
    records, _ = make_records([[4, 5, 3]])  # pairs: 3, 4 and 2
    batches = read_all(batches_of(records, num_rows=1, seq_len=7, whole=True))
    assert [int((batch["segment_ids"] > 0).sum()) for batch in batches] == [7, 2]


def test_a_document_that_no_row_holds_begins_where_the_row_is():
    records, _ = make_records([[4, 20], [5]])  # pairs: 3 and 19, 4
    batches = read_all(batches_of(records, num_rows=1, seq_len=8, whole=True))
    assert [int((batch["segment_ids"] > 0).sum()) for batch in batches] == [8, 8, 6, 4]
    assert batches[0]["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 2]]
