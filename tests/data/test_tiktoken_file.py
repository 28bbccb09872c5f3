"""The vocabulary of the first Qwen as a tokenizer.json, against what its format means: greedy joining by ranks."""

import base64
import collections
import pathlib
import re
import unicodedata

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from moe_jax.conversion import HuggingFaceDirectory, convert
from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer, find_tokenizer
from moe_jax.data.tokens.tiktoken_file import QWEN_PIECES, QWEN_SPECIAL, qwen_tokenizer
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint

TEXTS = [
    "The cat's hat, the bat's mat; I'LL say they'Ve 1234567 hats.\r\n\r\n  And  three\tmore   ",
    "Zürich, São Paulo, Ærøskøbing, naïve café: cafe\u0301 e\u0323\u0302",
    "敏捷的棕色狐狸跳过懒狗。吾輩は猫である。名前はまだ無い。 Быстрая лиса",
    "def f(x):\n    return x**2  # ²³ ½ Ⅷ ٣\n\n\n",
    "🙂🙃👩‍👩‍👧‍👦 🏳️‍🌈 \u200b\ufeff zero\u00a0width",
    "aaaaaaaaaaaaaaa aaaa aaaaaa       \n \n  bbbbbbbbb",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|><|extra_204|><|extra_205|>",
    "<|endoftext|>\u0338 not a token once it is composed",
    "", " ", "\n", "'", "zqwx", "xzqwx", "qwertyu",
]  # fmt: skip
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"], max_codepoint=0xFFFF), max_size=40)


def learned_ranks(seed: int = 0, joins: int = 600) -> dict[bytes, int]:
    """Bytes in a random order, then what pairs of neighbours in the texts make, mostly the most frequent ones."""
    rng = np.random.default_rng(seed)
    ranks = {bytes([byte]): rank for rank, byte in enumerate(rng.permutation(256).tolist())}
    pieces = [[bytes([b]) for b in piece.encode()] for text in TEXTS for piece in regex.findall(QWEN_PIECES, text)]
    for _ in range(joins):
        pairs = collections.Counter(pair for piece in pieces for pair in zip(piece, piece[1:], strict=False))
        if not pairs:
            break
        most = max(pairs.values())
        pair = sorted(pair for pair, count in pairs.items() if count >= most - int(rng.integers(0, 2)))[0]
        ranks.setdefault(pair[0] + pair[1], len(ranks))
        for piece in pieces:
            i = 0
            while i + 1 < len(piece):
                if piece[i] + piece[i + 1] == pair[0] + pair[1]:
                    piece[i : i + 2] = [pair[0] + pair[1]]
                i += 1
    return ranks


def write_ranks(file: pathlib.Path, ranks: dict[bytes, int]) -> pathlib.Path:
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return file


def joined(ranks: dict[bytes, int], piece: bytes) -> list[bytes]:
    """The first of the lowest pairs of neighbours is joined until there is none; a token is taken as it is."""
    parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ranks]
        if not pairs:
            return parts
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def ids_by_ranks(ranks: dict[bytes, int], text: str) -> list[int]:
    """What tiktoken does: special tokens, pieces, and in each what `joined` does."""
    special = {name: len(ranks) + i for i, name in enumerate(QWEN_SPECIAL)}
    ids = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", unicodedata.normalize("NFC", text)):
        if part in special:
            ids.append(special[part])
            continue
        for piece in regex.findall(QWEN_PIECES, part):
            ids += [ranks[part] for part in joined(ranks, piece.encode())]
    return ids


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return learned_ranks()


@pytest.fixture(scope="module")
def made(ranks, tmp_path_factory) -> tokenizers.Tokenizer:
    file = write_ranks(tmp_path_factory.mktemp("tiktoken") / "qwen.tiktoken", ranks)
    return tokenizers.Tokenizer.from_str(qwen_tokenizer(file))


def test_texts_are_cut_as_the_ranks_say(ranks, made):
    assert len(ranks) > 500 and made.get_vocab_size() == len(ranks) + 208
    for text in TEXTS:
        assert made.encode(text).ids == ids_by_ranks(ranks, text), text

    @settings(max_examples=300, deadline=None)
    @given(st.one_of(ANY_TEXT, st.lists(st.sampled_from([*TEXTS, " ", "a", "\n"]), max_size=4).map("".join)))
    def check(text):
        ids = made.encode(text).ids
        assert ids == ids_by_ranks(ranks, text)
        assert made.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)

    check()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_ranks_in_an_order_that_no_text_gives(tmp_path_factory, seed):
    """Tokens of few letters, which overlap each other in many ways."""
    rng = np.random.default_rng(seed)
    ranks = {bytes([byte]): byte for byte in range(256)}
    known = [b"a", b"b", b"c"]
    for _ in range(200):
        token = known[rng.integers(len(known))] + known[rng.integers(len(known))]
        if len(token) <= 9 and token not in ranks and len(joined(ranks, token)) == 2:
            ranks[token] = len(ranks)
            known.append(token)
    file = write_ranks(tmp_path_factory.mktemp("any") / "qwen.tiktoken", ranks)
    made = tokenizers.Tokenizer.from_str(qwen_tokenizer(file))
    for _ in range(20):
        text = bytes(rng.integers(97, 100, 30).tolist()).decode()
        assert made.encode(text).ids == ids_by_ranks(ranks, text)


def test_a_converted_model_has_a_tokenizer(ranks, tmp_path):
    config = {**CONFIGS["qwen"], "vocab_size": 1024, "eos_token_id": len(ranks)}
    source = HuggingFaceDirectory(write_checkpoint(tmp_path / "qwen", config, random_tensors(config)))
    assert source.tokenizer_files == ()
    write_ranks(tmp_path / "qwen" / "qwen.tiktoken", ranks)
    convert(tmp_path / "qwen", tmp_path / "ours", console=Console(quiet=True))
    ours = ModelDirectory(tmp_path / "ours")
    assert sorted(file.name for file in ours.tokenizer_files) == ["qwen.tiktoken", "tokenizer.json"]
    for model in (source, ours):
        tokenizer = Tokenizer(find_tokenizer(model.tokenizer_files, model.path), model.config)
        assert tokenizer.encode(TEXTS[0]).tolist() == ids_by_ranks(ranks, TEXTS[0])
    assert tokenizer.decode([*tokenizer.encode("a hat"), len(ranks)]) == "a hat"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.replace(b" 255\n", b" 256\n"), "has 256 tokens, but none of rank 255: it is damaged"),
        (lambda b: b + b"YWI=\n", "line 257 is 'YWI=', expected a token in base64 and its rank"),
        (lambda b: b + b"YWI 256\n", "base64 and its rank"),
        (lambda b: b + b"YWI= -1\n", "base64 and its rank"),
        (lambda b: b + b"YWI= 1 2\n", "base64 and its rank"),
        (lambda b: b + b"YWI= 99999999999999999999\n", "base64 and its rank"),
        (lambda b: b + b"\xff\xfe\x00 256\n", "base64 and its rank"),
        (lambda b: b + b"YWI= 255\n", "line 257: rank 255 was given before"),
        (lambda b: b + b"YWI= 256\nYWI= 257\n", "token twice"),
        (lambda b: b[b.index(b"\n") + 1 :].replace(b" 255\n", b" 0\n"), "token for byte 0"),
        (lambda b: b + base64.b64encode(b"a" * 300) + b" 256\n", "a token of 300 bytes, 256 are the most"),
        (lambda b: b + b"YWJj 256\nYWI= 257\n", "token of rank 256, 'abc'"),
        (lambda b: b"", "token for byte 0"),
    ],
)
def test_damaged_files_are_refused_in_a_line(tmp_path, change, message):
    file = write_ranks(tmp_path / "qwen.tiktoken", {bytes([byte]): byte for byte in range(256)})
    qwen_tokenizer(file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(InputError) as error:
        qwen_tokenizer(file)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_that_would_take_too_long_are_refused(tmp_path):
    ranks = {bytes([byte]): byte for byte in range(256)}
    rng = np.random.default_rng(0)
    for _ in range(4000):
        ranks[rng.bytes(256)] = len(ranks)
    with pytest.raises(InputError, match="more long tokens"):
        qwen_tokenizer(write_ranks(tmp_path / "qwen.tiktoken", ranks))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="can need"):
        qwen_tokenizer(tmp_path / "large")
