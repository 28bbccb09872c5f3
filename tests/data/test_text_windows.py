"""A long text has the tokens that it would have as a whole, in memory that does not grow with it."""

import functools
import threading

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers import pre_tokenizers as splitters

from moe_jax.core.errors import InputError
from moe_jax.data.tokens import text_windows
from moe_jax.data.tokens.text_windows import LongTexts
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.tiers import examples

TEXT = "The cat sat on the mat, and the unbelievable other cat ate 1234 of that. “Nein”, said É. 字、字！\n"
QWEN, O200K = text_windows._LETTERS_TOGETHER[1], text_windows._LOCAL_PATTERNS[4]
BYTES = splitters.ByteLevel(add_prefix_space=False, use_regex=False)


def of_bytes(*split):
    return models.BPE(), None, splitters.Sequence([*split, BYTES])


def by_pattern(pattern):
    return of_bytes(splitters.Split(Regex(pattern), "isolated"))


PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS = {
    "GPT-2": (models.BPE(), None, splitters.ByteLevel()),
    "SmolLM2": (models.BPE(), None, splitters.Sequence([splitters.Digits(True), splitters.ByteLevel(False)])),
    "Qwen": (models.BPE(), normalizers.NFC(), by_pattern(QWEN)[2]),
    "o200k": by_pattern(O200K),
    "Llama 3": (models.BPE(ignore_merges=True), None, by_pattern(QWEN)[2]),
    "one word": of_bytes(),
    "Llama 2": (models.BPE(unk_token="<unk>", fuse_unk=True), PREPENDED, None),
    "Gemma": (
        models.BPE(unk_token="<unk>"),
        normalizers.Replace(" ", "▁"),
        splitters.Split(" ", "merged_with_previous"),
    ),
    "T5": (
        models.Unigram(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        splitters.Sequence([splitters.WhitespaceSplit(), splitters.Metaspace()]),
    ),
    "BERT": (models.WordPiece(unk_token="<unk>"), normalizers.BertNormalizer(), splitters.BertPreTokenizer()),
}
TRAINERS = {
    models.BPE: trainers.BpeTrainer,
    models.Unigram: trainers.UnigramTrainer,
    models.WordPiece: trainers.WordPieceTrainer,
}


@pytest.fixture(scope="module")
def stories(data_dir):
    return Tokenizer.from_file(str(data_dir / "weights" / "stories260K" / "hf" / "tokenizer.json"))


@functools.cache
def tokenizer_of(kind):
    model, normalizer, splitter = KINDS[kind]
    made = Tokenizer(model)
    made.normalizer, made.pre_tokenizer = normalizer, splitter
    alphabet = splitters.ByteLevel.alphabet() if isinstance(model, models.BPE) and "▁" not in str(normalizer) else []
    options = {
        "vocab_size": 380,
        "special_tokens": ["<unk>", "<s>"],
        "show_progress": False,
        "initial_alphabet": alphabet,
    }
    if isinstance(model, models.Unigram):
        options["unk_token"] = "<unk>"
    made.train_from_iterator([TEXT * 3], TRAINERS[type(model)](**options))
    made.add_special_tokens([AddedToken("<m>", lstrip=True, rstrip=True), AddedToken("cat", single_word=True)])
    return made


PIECES = [
    *(
        "the ",
        "cat",
        "sat on",
        " ",
        "  ",
        "\n",
        "\n\n",
        "a",
        "bb",
        "X",
        "12",
        "3456",
        "é",
        "字",
        "，",
        "。",
        "'s",
        "n't",
    ),
    *(
        "<s>",
        "<m>",
        "<unk>",
        "=",
        "...",
        "\t",
        "e\u0301",
        "ﬁ",
        "🙂",
        "un",
        "believ",
        "able",
        ", ",
        ",",
        "\u0301",
        "cat ",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=2, max_size=8, unique=True).flatmap(
    lambda some: st.lists(st.sampled_from(some), min_size=30, max_size=120).map("".join)
)


@pytest.mark.parametrize("kind", [*KINDS, "stories260K"])
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
@example(text="a" * 139 + "4a6ubelievable")  # a token of the first window that the second one has not
def test_the_tokens_are_those_of_the_whole_text(request, kind, text):
    tokenizer = tokenizer_of(kind) if kind in KINDS else request.getfixturevalue("stories")
    whole = tokenizer.encode(text, add_special_tokens=False)
    found = LongTexts(tokenizer, window=64, overlap=20)(text)
    assert found.ids.tolist() == whole.ids
    assert list(map(tuple, found.offsets.tolist())) == whole.offsets


class Sizes:
    """A tokenizer that notes how many characters it is given at a time."""

    def __init__(self, tokenizer):
        self._tokenizer, self.seen = tokenizer, []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, **options):
        self.seen.append(len(text))
        return self._tokenizer.encode(text, **options)

    def encode_batch(self, texts, **options):
        self.seen += map(len, texts)
        return self._tokenizer.encode_batch(texts, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [TEXT, "unbelievable", "cat,mat,"])
def test_no_more_than_a_window_is_tokenised_at_a_time(kind, text):
    sizes = Sizes(tokenizer_of(kind))
    LongTexts(sizes, window=512, overlap=160)(text * (6000 // len(text)))
    # A long word is one thing to a model that does not join bytes, and where a word may be a token as it is.
    in_one = text == "unbelievable" and kind in ("T5", "BERT", "Llama 3", "o200k")
    assert (max(sizes.seen) > 5000) == in_one
    if not in_one:
        assert max(sizes.seen) == 512 and sum(sizes.seen) < 10_000


def test_a_text_that_cannot_be_cut_is_not_tokenised_in_any_amount_of_memory(monkeypatch):
    monkeypatch.setattr(text_windows, "MOST_UNCUT", 1000)
    unknown = tokenizer_of("Qwen").from_str(tokenizer_of("Qwen").to_str())
    unknown.pre_tokenizer = splitters.Split(Regex(r"(?m).*X|."), "isolated")
    assert len(LongTexts(unknown)("a" * 1000).ids)
    for tokenizer, text in ((unknown, "a b " * 251), (tokenizer_of("BERT"), "a" * 1001)):
        with pytest.raises(InputError, match="cannot be tokenised"):
            LongTexts(tokenizer, window=200, overlap=20)(text)


def test_other_threads_go_on_while_a_text_that_cannot_be_cut_is_tokenised(tmp_path):
    made = Tokenizer.from_file(str(byte_tokenizer(tmp_path / "tokenizer.json")))
    made.pre_tokenizer = splitters.Sequence([splitters.Split(Regex("q+z"), "isolated"), made.pre_tokenizer])
    texts, counts, done = LongTexts(made), [], threading.Event()
    assert not texts._can_cut

    def count():
        while not done.wait(0.0005):
            counts.append(1)

    other = threading.Thread(target=count)
    other.start()
    before = len(counts)
    encoding = texts._encoding("ab" * 200_000)
    meanwhile = len(counts) - before
    done.set()
    other.join()
    assert len(encoding.ids) == 400_000 and meanwhile >= 5
