"""Token ids are the same every time; what is scored of a text, and what an identity is made of."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer, _within, find_tokenizer, tokenizer_identity
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config

WORDS = "the cat sat on the mat and the other cat ate that"


def test_dropout_of_bpe_is_off(tmp_path):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel()
    library.train_from_iterator([WORDS] * 20, trainers.BpeTrainer(vocab_size=300))
    expected = tuple(library.encode(WORDS).ids)
    library.model.dropout = 0.5
    assert len({tuple(library.encode(WORDS).ids) for _ in range(20)}) > 1
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", dense_config(vocab_size=512))
    assert {tuple(tokenizer.encode(WORDS).tolist()) for _ in range(20)} == {expected}


def test_a_tokenizer_of_another_model_is_said_to_be(tmp_path):
    tokenizer = Tokenizer(byte_tokenizer(tmp_path / "tokenizer.json"), dense_config(vocab_size=ord("b")))
    assert tokenizer.encode("aaa").tolist() == [ord("a")] * 3
    with pytest.raises(InputError, match=r"token id 98 \('b'\), .* has 98 entries"):
        tokenizer.encode("abc"[:2])


@given(
    edges=st.lists(st.integers(0, 20), unique=True, max_size=6).map(sorted),
    lengths=st.lists(st.integers(0, 4), max_size=8),
)
def test_tokens_are_scored_that_have_a_character_in_a_span(edges, lengths):
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    ends = np.cumsum([0, *lengths])
    offsets = np.stack([ends[:-1], ends[1:]], axis=1).astype(np.int32).reshape(-1, 2)
    expected = [float(any(max(b, first) < min(e, last) for b, e in spans)) for first, last in offsets if first < last]
    found = _within(spans, offsets)
    assert found.dtype == np.float32 and found.shape == (len(lengths),)
    assert found[offsets[:, 0] < offsets[:, 1]].tolist() == expected


def test_an_identity_is_of_all_that_ids_depend_on(tmp_path):
    file = byte_tokenizer(tmp_path / "tokenizer.json")
    found = [tokenizer_identity(file)]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a"}))
    found.append(tokenizer_identity(file))
    (tmp_path / "chat_template.jinja").write_text("b")
    found.append(tokenizer_identity(file))
    (tmp_path / "mine.jinja").write_text("c")
    found.append(tokenizer_identity(file, str(tmp_path / "mine.jinja")))
    (tmp_path / "mine.jinja").write_text("b")
    assert tokenizer_identity(file, str(tmp_path / "mine.jinja")) == found[2]  # the same by another name
    file.write_text(file.read_text() + " ")
    found.append(tokenizer_identity(file))
    assert len({*found}) == len(found) == 5 and all(len(one) == 64 for one in found)


def test_the_tokenizer_is_found_among_files(tmp_path):
    files = [tmp_path / name for name in ("tokenizer_config.json", "tokenizer.json", "a.json")]
    assert find_tokenizer(files, "it") == files[1]
    with pytest.raises(InputError, match="^it has no"):
        find_tokenizer(files[::2], "it")
