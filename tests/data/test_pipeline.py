"""From recipe to batches: special tokens, scored responses, shuffling, epochs, mixing, bad input."""

import collections
import dataclasses
import json

import grain
import numpy as np
import pytest

from moe_jax.core.errors import InputError
from moe_jax.data import sources
from moe_jax.data.pipeline import _InBlocks, open_data
from moe_jax.data.rows import Example
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer

CONFIG = ModelConfig(
    family="llama",
    vocab_size=258,
    d_model=8,
    max_positions=64,
    layers=(LayerConfig(attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8), mlp=FFNConfig(dim=8)),),
    bos_id=BOS,
    eos_ids=(EOS,),
)


def data(tokenizer_path, *source_sections, batch_size=2, seed=0, config=CONFIG, note=print, **options):
    section = DataSection(sources=source_sections, **{"seq_len": 8, "prefetch": 0, **options})
    rows = range(batch_size)
    return open_data(section, config, tokenizer_path, seed=seed, batch_size=batch_size, rows=rows, note=note)


def text_of(batches) -> str:
    """The inputs of all rows, row after row."""
    rows = len(batches[0]["tokens"])
    parts = [batch["tokens"][r][batch["segment_ids"][r] > 0] for r in range(rows) for batch in batches]
    return bytes(int(t) for t in np.concatenate(parts) if t < 256).decode()


def read_all(iterator):
    batches = []
    while (batch := next(iterator))["segment_ids"].any():
        batches.append(batch)
    return batches


@pytest.mark.parametrize(
    ("adds_bos", "bos", "eos", "expected"),
    [
        (False, "auto", "auto", [*b"ab", EOS]),
        (True, "auto", "auto", [BOS, *b"ab"]),
        (False, "always", "auto", [BOS, *b"ab"]),
        (True, "auto", "always", [BOS, *b"ab", EOS]),
        (True, "never", "never", [*b"ab"]),
    ],
)
def test_special_tokens_of_plain_documents(tmp_path, adds_bos, bos, eos, expected):
    path = byte_tokenizer(tmp_path / "tokenizer.json", adds_bos=adds_bos)
    pairs = Tokenizer(path, CONFIG, bos=bos, eos=eos).pairs([Example("ab")])
    assert [*pairs.tokens.tolist(), pairs.targets[-1]] == expected
    assert pairs.weights.all()
    assert pairs.starts.tolist() == [True] + [False] * (len(expected) - 2)


def test_every_document_of_a_record_begins_a_segment(tokenizer_path):
    tokenizer = Tokenizer(tokenizer_path, CONFIG, bos="never", eos="never")
    pairs = tokenizer.pairs([Example("ab"), Example("x"), Example("cde")])
    assert pairs.tokens.tolist() == [*b"acd"] and pairs.targets.tolist() == [*b"bde"]  # "x" has nothing to predict
    assert pairs.starts.tolist() == [True, True, False]


def test_a_piece_inside_a_document_gets_no_special_tokens(tmp_path):
    tokenizer = Tokenizer(byte_tokenizer(tmp_path / "t.json"), CONFIG, bos="always", eos="always")
    pairs = tokenizer.pairs([Example("abc", begins=False, ends=False)])
    assert [*pairs.tokens.tolist(), pairs.targets[-1]] == [*b"abc"]


def test_loss_is_on_the_response_and_its_end_only(tokenizer_path):
    pairs = Tokenizer(tokenizer_path, CONFIG).pairs([Example("2+2=four", 4, is_response=True)])
    scored = pairs.targets[pairs.weights > 0]
    assert scored.tolist() == [*b"four", EOS]
    assert pairs.tokens.tolist() == [*b"2+2=four"]
    assert set(pairs.weights.tolist()) == {0.0, 1.0}


def test_every_document_is_read_once_per_epoch_in_a_new_order(tmp_path, tokenizer_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document number {i:02d};"}) + "\n" for i in range(30)))
    source = SourceSection(path=str(path))
    batches = read_all(data(tokenizer_path, source, epochs=2, eos="always"))
    documents = [f"document number {i:02d};" for i in range(30)]
    read = text_of(batches).split(";")[:-1]
    assert collections.Counter(read) == collections.Counter({d[:-1]: 2 for d in documents})
    assert read != sorted(read)
    again = read_all(data(tokenizer_path, source, epochs=2, eos="always"))
    other = read_all(data(tokenizer_path, source, epochs=2, eos="always", seed=1))
    assert text_of(again) == text_of(batches) != text_of(other)
    plain = read_all(data(tokenizer_path, source, epochs=1, eos="always", shuffle=False, batch_size=1))
    assert text_of(plain) == "".join(documents)


def test_the_position_survives_json_and_prefetching(tmp_path, tokenizer_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(400)))
    iterator = data(tokenizer_path, SourceSection(path=str(path)), prefetch=2)
    for _ in range(7):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator) for _ in range(3)]
    resumed = data(tokenizer_path, SourceSection(path=str(path)), prefetch=3)
    resumed.set_state(state)
    for want in expected:
        got = next(resumed)
        assert all(np.array_equal(want[key], got[key]) for key in want)
    path.write_text("other text, which is longer than one sequence\n" * 20)
    changed = data(tokenizer_path, SourceSection(path=str(path)))
    with pytest.raises(InputError, match="training data changed"):
        changed.set_state(state)


def test_weights_are_shares_of_text(tmp_path, tokenizer_path):
    (tmp_path / "long.txt").write_text("l" * 127 + "\n" + ("l" * 127 + "\n") * 999)
    (tmp_path / "short.jsonl").write_text((json.dumps({"text": "s" * 15}) + "\n") * 200)
    iterator = data(
        tokenizer_path,
        SourceSection(path=str(tmp_path / "long.txt"), weight=3),
        SourceSection(path=str(tmp_path / "short.jsonl"), weight=1),
        eos="never",
        batch_size=4,
    )
    tokens = np.concatenate([next(iterator)["tokens"].ravel() for _ in range(1500)])
    # JSONL syntax counts as bytes of the file, so the text's share is a little below 1/4.
    share = (tokens == ord("s")).sum() / len(tokens)
    assert 0.1 < share < 0.27


@pytest.fixture
def weighted(tmp_path) -> list[SourceSection]:
    """Two sources of nearly equal size and weight, of which one has three times as many records."""
    for name, count, size in (("a", 300, 30), ("b", 100, 118)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": name * size}) + "\n") * count)
    return [SourceSection(path=str(tmp_path / f"{name}.jsonl"), weight=1.0) for name in "ab"]


@pytest.mark.parametrize("batch_size", [3, 4])
def test_weights_are_kept_where_a_mixture_repeats_with_the_rows_of_a_batch(tokenizer_path, weighted, batch_size):
    """One record in four is of `b`: in order, a row in four would read nothing else, and a batch be 3/4 `a`."""
    iterator = data(tokenizer_path, *weighted, seq_len=32, batch_size=batch_size)
    batches = [next(iterator) for _ in range(60)]
    of_a, of_b = (sum(int((batch["tokens"] == ord(name)).sum()) for batch in batches) for name in "ab")
    assert 0.38 < of_a / (of_a + of_b) < 0.5


def test_in_blocks_every_record_is_read_once():
    found = [_InBlocks(grain.MapDataset.range(22), size=4, seed=seed) for seed in (0, 0, 1)]
    orders = [[records[index] for index in range(22)] for records in found]
    for order in orders:
        assert [sorted(order[i : i + 4]) for i in range(0, 22, 4)] == [
            list(range(22))[i : i + 4] for i in range(0, 22, 4)
        ]
    assert orders[0] == orders[1] != orders[2] and orders[0] != list(range(22))


def test_positions_in_weighted_sources_are_resumed_and_those_of_an_older_order_refused(tokenizer_path, weighted):
    iterator = data(tokenizer_path, *weighted, batch_size=4)
    for _ in range(7):
        next(iterator)
    state, expected = json.loads(json.dumps(iterator.get_state())), next(iterator)
    resumed = data(tokenizer_path, *weighted, batch_size=4)
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed)["tokens"], expected["tokens"])
    del state["identity"]["blocks"]
    with pytest.raises(InputError, match="older order"):
        resumed.set_state(state)


def test_the_source_that_ends_the_data_is_named(tokenizer_path, weighted):
    noted = []
    data(tokenizer_path, weighted[0], dataclasses.replace(weighted[1], weight=3.0), epochs=1, note=noted.append)
    assert len(noted) == 1 and "b.jsonl" in noted[0]
    data(tokenizer_path, *weighted, note=noted.append)
    assert len(noted) == 1


def test_a_text_shorter_than_a_sequence_is_one_clear_line(tmp_path, tokenizer_path):
    (tmp_path / "a.txt").write_text("abc\n")
    with pytest.raises(InputError) as error:
        data(tokenizer_path, SourceSection(path=str(tmp_path / "a.txt")), eos="never")
    assert f"{tmp_path}/a.txt is too short: 4 tokens in 1 documents do not fill one sequence" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_source_has_no_text(tmp_path, tokenizer_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(InputError, match="a.jsonl holds no text"):
        data(tokenizer_path, SourceSection(path=str(tmp_path / "a.jsonl")))


def test_a_bad_line_far_into_a_file_is_found_before_training(tmp_path, tokenizer_path):
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"text": "long enough for a sequence"}) + "\n") * 50 + "oops\n")
    with pytest.raises(InputError, match="line 51: expected"):
        data(tokenizer_path, SourceSection(path=str(path)))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_bad_line_behind_what_is_checked_is_named_when_it_is_read(tmp_path, tokenizer_path, monkeypatch, prefetch):
    monkeypatch.setattr(sources, "CHECKED_BYTES", 10)
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"text": "long enough for a sequence"}) + "\n") * 50 + "oops\n")
    iterator = data(tokenizer_path, SourceSection(path=str(path)), epochs=1, prefetch=prefetch)
    with pytest.raises(InputError, match="line 51: expected"):
        read_all(iterator)


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path, tokenizer_path):
    (tmp_path / "a.txt").write_text("abcdefghijklmnop\n")
    small = dataclasses.replace(CONFIG, vocab_size=100, bos_id=None, eos_ids=())
    with pytest.raises(InputError, match=r"gives token id 1\d\d .* vocabulary has 100 entries"):
        data(tokenizer_path, SourceSection(path=str(tmp_path / "a.txt")), config=small)


def with_bos(change):
    """Changes what the file says about the token that documents begin with."""

    def changed(content: dict) -> dict:
        special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
        piece = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        template = {"type": "TemplateProcessing", "single": [piece, text], "pair": [text, text]}
        return content | {"post_processor": template | {"special_tokens": special} | change}

    return changed


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (with_bos({"special_tokens": {}}), "is not a tokenizer.json: "),  # the library panics
        (
            with_bos({"special_tokens": {"<s>": {"id": "<s>", "ids": [2**31], "tokens": ["<s>"]}}}),
            r"gives token id 2147483648 \(None\), but the model's",
        ),
        (lambda content: content | {"version": "x" * 100_000}, "is not a tokenizer.json: "),
    ],
)
def test_what_a_tokenizer_cannot_be_is_one_short_line(tmp_path, tokenizer_path, change, complaint):
    (tmp_path / "tokenizer.json").write_text(json.dumps(change(json.loads(tokenizer_path.read_bytes()))))
    with pytest.raises(InputError, match=complaint) as error:
        Tokenizer(tmp_path / "tokenizer.json", CONFIG).prompt("a")
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_no_sources_missing_files_and_wrong_tokenizers_are_clear(tmp_path, tokenizer_path):
    (tmp_path / "a.txt").write_text("abc\n")
    with pytest.raises(InputError, match=r"no data: add \[\[data\.sources\]\]"):
        data(tokenizer_path)
    with pytest.raises(FileNotFoundError, match="no file matches .*missing.txt"):
        data(tokenizer_path, SourceSection(path=str(tmp_path / "missing.txt")))
    with pytest.raises(InputError, match="a.txt is not a tokenizer.json"):
        data(tmp_path / "a.txt", SourceSection(path=str(tmp_path / "a.txt")))
    nameless = dataclasses.replace(CONFIG, bos_id=None)
    with pytest.raises(InputError, match='data.bos = "always", but .* no BOS token'):
        data(tokenizer_path, SourceSection(path=str(tmp_path / "a.txt")), config=nameless, bos="always")
