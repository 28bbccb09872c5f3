"""No token stands for more characters than the bound says, or there is none."""

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from moe_jax.data.tokens.token_lengths import most_characters
from tests.support.byte_tokenizer import byte_tokenizer

OF_BYTES = pre_tokenizers.ByteLevel()


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes") / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "expected"),
    [
        (None, OF_BYTES, 4),
        (normalizers.Prepend(" "), pre_tokenizers.Sequence([pre_tokenizers.Digits(), OF_BYTES]), 4),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "_")]), OF_BYTES, 16),
        (normalizers.Replace("  ", " "), OF_BYTES, None),
        (normalizers.Replace(Regex(" +"), " "), OF_BYTES, None),
        (normalizers.Strip(), OF_BYTES, None),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), OF_BYTES]), None),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), OF_BYTES]), 4),
        (None, pre_tokenizers.Whitespace(), None),
    ],
)
def test_steps_before_the_model(content, normalizer, pre_tokenizer, expected):
    tokenizer = Tokenizer.from_str(content)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    assert most_characters(tokenizer) == expected


def test_unknown_characters_have_no_bound_unless_bytes_stand_for_them():
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for vocab, falls_back, expected in (
        (bytes_ | {"▁abcdefgh": 256}, True, 9),
        (bytes_ | {"▁abcdefgh": 256}, False, None),
        ({"a": 0}, True, None),
    ):
        assert most_characters(Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=falls_back))) == expected
