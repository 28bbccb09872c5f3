"""Text of tokens as they come, against what the tokenizer makes of all of them together."""

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_jax.generation.texts import StreamedText
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer

BROKEN = "\ufffd"


@pytest.fixture(scope="module")
def decoders(tmp_path_factory, data_dir):
    """Byte-level BPE of single bytes; and SentencePiece with tokens for bytes, which drops a text's first space."""
    own = tokenizers.Tokenizer.from_file(str(byte_tokenizer(tmp_path_factory.mktemp("text") / "tokenizer.json")))
    stories = tokenizers.Tokenizer.from_file(str(data_dir / "weights" / "stories260K" / "hf" / "tokenizer.json"))
    return {"bytes": own, "stories": stories}


def pieces(tokenizer, ids, stop=(), before=()) -> tuple[list[str], StreamedText]:
    row = StreamedText(tokenizer.decode, stop, before)
    return [*(row.push(token) for token in ids), row.finish()], row


@pytest.mark.parametrize("kind", ["bytes", "stories"])
@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.text(max_size=6, alphabet=" ab\néß漢🎉"))
@example("née 漢字 🎉 \ufffd\ufffd\ufffd\ufffd\ufffd x", " ")
def test_pieces_are_whole_characters_and_together_the_text(kind, decoders, text, before):
    tokenizer = decoders[kind]
    prompt = tokenizer.encode(before, add_special_tokens=kind == "stories").ids
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    got, row = pieces(tokenizer, ids, before=prompt)
    whole, start = tokenizer.decode([*prompt, *ids]), tokenizer.decode(prompt)
    assert whole.startswith(start)
    assert "".join(got) == row.text == whole[len(start) :]
    assert text.count(BROKEN) == row.text.count(BROKEN)


@settings(max_examples=80)
@given(st.lists(st.integers(0, 255), max_size=12))
@example([0xE6, 0xBC, 0xA2, 0xE6])
@example([0xF0] * 9 + [0x9F, 0x8E, 0x89, 65])
def test_bytes_that_are_no_text_come_as_the_tokenizer_shows_them(decoders, ids):
    got, _ = pieces(decoders["bytes"], ids)
    assert "".join(got) == decoders["bytes"].decode(ids)


def test_half_a_character_waits_and_special_tokens_say_nothing(decoders):
    ids = [*"é".encode(), BOS, 65, EOS, *"🎉".encode()]
    assert pieces(decoders["bytes"], ids)[0] == ["", "é", "", "A", "", "", "", "", "🎉", ""]
    assert pieces(decoders["bytes"], [0x82, 0xAC], before=[0xE2])[0] == ["", "€", ""]


@settings(max_examples=100)
@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_and_what_begins_like_one_is_not_handed_out(decoders, text, stops):
    ids = list(text.encode())
    got, row = pieces(decoders["bytes"], ids, stops)
    # What has come is handed out when no stop string can begin in it any more.
    found = [end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)]
    if not found:
        assert "".join(got) == text and row.ended_by is None
        return
    before = text[: found[0]]
    assert row.ended_by in stops
    assert "".join(got) == row.text == before[: min(before.index(stop) for stop in stops if stop in before)]


def test_of_several_stop_strings_the_first_that_is_complete_ends_a_text_however_it_comes(decoders):
    whole = StreamedText(lambda ids: "abc" * len(ids), ["abc", "b"])  # a token of three characters
    for row, ids in ((whole, [0]), (StreamedText(decoders["bytes"].decode, ["abc", "b"]), b"abc")):
        assert "".join(map(row.push, ids)) == "a" and row.ended_by == "b"


def test_a_beginning_of_a_stop_string_that_does_not_go_on_is_handed_out(decoders):
    assert pieces(decoders["bytes"], b"a##b#", ["###"])[0] == ["a", "", "", "##b", "", "#"]
    got, row = pieces(decoders["bytes"], b"a###b", ["###"])
    assert got == ["a", "", "", "", "", ""] and row.ended_by == "###" and row.text == "a"
