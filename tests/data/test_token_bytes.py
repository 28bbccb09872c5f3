"""The bytes of a text's tokens, joined, are the text: of byte-level vocabularies, and of SentencePiece's."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from moe_jax.data.tokens.token_bytes import TokenBytes
from tests.support.byte_tokenizer import BOS, byte_tokenizer

TEXT = "a a é🔥\n"


def of_bytes(folder) -> Tokenizer:
    made = Tokenizer.from_file(str(byte_tokenizer(folder / "tokenizer.json")))
    made.add_tokens([AddedToken("a 中", special=False)])
    return made


def of_pieces(folder) -> Tokenizer:
    vocab = {"<s>": 0, "▁": 1, "a": 2, "▁a": 3, "é": 4, **{f"<0x{byte:02X}>": 5 + byte for byte in range(256)}}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<s>"])
    return made


@pytest.mark.parametrize(("make", "special", "first"), [(of_bytes, BOS, ""), (of_pieces, 0, " ")])
def test_bytes_of_tokens_make_the_text(make, special, first, tmp_path):
    tokenizer = make(tmp_path)
    bytes_of = TokenBytes(tokenizer)
    for text in (TEXT, "a 中"):
        ids = tokenizer.encode(text).ids
        assert b"".join(map(bytes_of, ids)).decode() == first + text  # the first space is taken from a text as a whole
    assert len(bytes_of(tokenizer.encode("🔥").ids[-1])) == 1
    assert bytes_of(special) == bytes_of(10_000) == b""
