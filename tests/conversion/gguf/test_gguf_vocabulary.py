"""Tokenizers made of GGUF metadata: the same ids as the tokenizer.json that the metadata were taken from."""

import json
import unicodedata

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from moe_jax.conversion.gguf.gguf_cuts import PIECES
from moe_jax.conversion.gguf.gguf_vocabulary import tokenizer_of
from moe_jax.core.errors import InputError

TEXTS = (
    "It's 12345 o'clock, WE'LL see\u2026  two  spaces\n\n\tand a tab \r\n 3.14",
    "na\u00efve caf\u00e9, cafe\u0301: \u4f60\u597d\u4e16\u754c \U0001f600\u200d\U0001f525 \u0645\u0631\u062d",
    "def f(x):\n    return x ** 2  # <|end|>done",
    "",
    " ",
    "<|begin|>user<|sep|>\u00a0x",
)
WORDS = ["It's", "we", "two  spaces", "1234", "caf\u00e9", "return", "def f(x)", "\n\n", "\u4f60\u597d"]
# Cuts as the publishers' tokenizer.json say them, written down by hand.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BY_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
PUBLISHED = {
    "gpt-2": (None, [BY_WORDS]),
    "smollm": (None, [pre_tokenizers.Digits(True), BY_WORDS]),
    "llama-bpe": (None, [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), TO_BYTES]),
    "qwen2": (normalizers.NFC(), [pre_tokenizers.Split(Regex(QWEN2), "isolated"), TO_BYTES]),
    "deepseek-v3": (
        normalizers.Sequence([]),
        [*(pre_tokenizers.Split(Regex(cut), "isolated") for cut in DEEPSEEK_V3), TO_BYTES],
    ),
    "deepseek-coder": (
        normalizers.Sequence([]),
        [
            *(
                pre_tokenizers.Split(Regex(cut), "isolated")
                for cut in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_HAN)
            ),
            pre_tokenizers.Digits(True),
            TO_BYTES,
        ],
    ),
}


def published(pre: str) -> tokenizers.Tokenizer:
    """A small tokenizer, cut as a family's is, trained on a few words."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    normalizer, cuts = PUBLISHED[pre]
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
    )  # fmt: skip
    made.train_from_iterator([*TEXTS, *WORDS], trainer)
    made.add_tokens([AddedToken("<|sep|>", normalized=False)])
    return made


def metadata_of(made: tokenizers.Tokenizer, pre: str) -> dict:
    model = json.loads(made.to_str())["model"]
    tokens = [made.id_to_token(i) for i in range(made.get_vocab_size())]
    kinds = {"<|begin|>": 3, "<|end|>": 3, "<|sep|>": 4}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "[PAD0]", "[PAD0]"],
        "tokenizer.ggml.token_type": np.array([*(kinds.get(token, 1) for token in tokens), 5, 5], np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize("pre", PUBLISHED)
def test_bytes(pre):
    theirs = published(pre)
    tokenizer, said = tokenizer_of(metadata_of(theirs, pre))
    ours = tokenizers.Tokenizer.from_str(tokenizer)
    for text in (*TEXTS, *WORDS):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert ours.decode(ids, skip_special_tokens=False) == expected
    assert ours.encode("we").ids[:1] == ([0] if pre == "llama-bpe" else theirs.encode("we").ids[:1])
    assert "<|" not in ours.decode([0, 1]) and said["chat_template"] == "{{ messages }}"
    assert (said["bos_token"], said["eos_token"]) == ("<|begin|>", "<|end|>")


def test_bos_and_eos_where_the_file_says_so():
    metadata = metadata_of(published("gpt-2"), "gpt-2")
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ours = tokenizers.Tokenizer.from_str(tokenizer_of(metadata)[0])
    ids = ours.encode("we").ids
    assert (ids[0], ids[-1]) == (0, 1) and 0 not in ids[1:]


def test_characters(data_dir):
    """The tokenizer of stories260K: SentencePiece, whose scores are the negative ranks of its tokens."""
    file = data_dir / "weights" / "stories260K" / "hf" / "tokenizer.json"
    theirs = tokenizers.Tokenizer.from_file(str(file))
    tokens = [theirs.id_to_token(i) for i in range(theirs.get_vocab_size())]
    kinds = [2, 3, 3, *(6 if token.startswith("<0x") else 1 for token in tokens[3:])]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.array([0] * 259 + [-float(i) for i in range(len(tokens) - 259)], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    ours = tokenizers.Tokenizer.from_str(tokenizer_of(metadata)[0])
    stories = (data_dir / "text" / "tinystories" / "tinystories_sample_2MiB.txt").read_text()[:100_000]
    for text in (*TEXTS, stories):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode("Once").ids[0] == 1
    plain, _ = tokenizer_of(
        metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    without = tokenizers.Tokenizer.from_str(plain)
    assert without.decode(without.encode("a b").ids) == "a b" and without.encode("a").tokens == ["a"]


def test_a_file_without_tokenizer_has_none():
    assert tokenizer_of({}) is None and tokenizer_of({"tokenizer.ggml.model": "none"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', known are gpt-2, "),
        ({"tokenizer.ggml.pre": "lama-bpe"}, "did you mean 'llama-bpe'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None, known"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5', known are gpt2, llama; .* checkpoint"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": None}, "holds 'a' twice"),
        ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens is 3, expected a list"),
        ({"tokenizer.ggml.token_type": np.zeros(3)}, "token_type"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges holds 'ab', which is"),
        ({"tokenizer.ggml.merges": ["x\u00e4 y\u00e4"]}, "make no tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000, but there are"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template is 3, expected a text"),
    ],
)
def test_what_is_unknown_or_damaged_is_one_line(change, message):
    metadata = metadata_of(published("gpt-2"), "gpt-2") | change
    with pytest.raises(InputError, match=message) as caught:
        tokenizer_of(metadata)
    assert len(str(caught.value).splitlines()) == 1


def test_every_cut_makes_a_tokenizer_of_files():
    metadata = metadata_of(published("gpt-2"), "gpt-2")
    for pre in PIECES:
        tokenizer, _ = tokenizer_of(metadata | {"tokenizer.ggml.pre": pre})
        assert tokenizers.Tokenizer.from_str(tokenizer).encode("It's 12").ids


def test_tokens_of_users_are_text_and_control_tokens_are_not():
    made = tokenizers.Tokenizer.from_str(tokenizer_of(metadata_of(published("gpt-2"), "gpt-2"))[0])
    special = {token.content: token.special for token in made.get_added_tokens_decoder().values()}
    assert special == {"<|begin|>": True, "<|end|>": True, "<|sep|>": False}
    ids = made.encode("<|end|>we<|sep|>", add_special_tokens=False).ids
    assert made.decode(ids, skip_special_tokens=True) == "we<|sep|>"


def test_pieces_of_equal_score_are_joined_in_the_order_of_their_numbers():
    """Those of the left part first, as Transformers orders them."""
    tokens = ["<unk>", "\u2581", "c", "b", "a", "bc", "ab"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([2, 1, 1, 1, 1, 1, 1], np.int32),
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    made = tokenizers.Tokenizer.from_str(tokenizer_of(metadata)[0])
    assert [tuple(merge) for merge in json.loads(made.to_str())["model"]["merges"]] == [("b", "c"), ("a", "b")]
    assert made.encode("abc").tokens == ["a", "bc"]
