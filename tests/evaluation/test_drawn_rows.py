"""Rows that are drawn of a file of data."""

import json

import pytest

from moe_jax.core.errors import InputError
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.evaluation.drawn_rows import draw_rows
from moe_jax.evaluation.held_out import with_lengths
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config

CONFIG = dense_config(vocab_size=258)


@pytest.fixture
def draw(tmp_path):
    """Draws rows, and returns them as texts."""
    rows = [{"text": f"{number:02} text"} for number in range(20)]
    rows.insert(7, {"prompt": "a question? ", "response": "yes"})
    rows.insert(0, {"text": "long " * 4})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")

    def check(*, most, seq_len=16, **options):
        data = with_lengths(DataSection(), seq_len=seq_len)
        drawn = draw_rows(SourceSection(path=str(file)), data, CONFIG, tokenizer, most=most, **options)
        return [bytes(row.tokens.tolist()).decode() for row in drawn]

    return check


def test_rows_are_drawn_once_each_and_in_order(draw):
    every = draw(most=100)
    # The last token of a document is only predicted; a text that is longer than a row is several.
    assert every[:3] == ["long long long l", "ong", "00 tex"] and len({*every}) == len(every) == 23
    whole = draw(most=100, seq_len=100)
    assert len(whole) == 22 and whole[8] == "a question? ye"
    some = [draw(most=9, seq_len=100, seed=seed) for seed in range(4)]
    assert len({tuple(one) for one in some}) == 4 and some[3] == draw(most=9, seq_len=100, seed=3)
    for one in some:
        places = [whole.index(row) for row in one]
        assert len(places) == 9 and places == sorted({*places})


def test_too_few_are_an_error(draw, tmp_path):
    with pytest.raises(InputError, match="22 rows of"):
        draw(most=23, at_least=23, seq_len=100)
    with pytest.raises(FileNotFoundError, match="absent"):
        draw_rows(SourceSection(path="absent.jsonl"), DataSection(), CONFIG, tmp_path / "tokenizer.json", most=1)
