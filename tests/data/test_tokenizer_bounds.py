"""Tokenizers that multiply a text are refused, and those in use are not."""

import struct

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, processors
from tokenizers import normalizers as forms
from tokenizers import pre_tokenizers as splitters

from moe_jax.core.errors import InputError
from moe_jax.data.tokens.text_windows import _LOCAL_PATTERNS
from moe_jax.data.tokens.tokenizer_bounds import MOST_GROWTH, check_growth

REPLACE, TEMPLATE = forms.Replace, processors.TemplateProcessing


def made(normalizer=None, decoder=None, post_processor=None, pre_tokenizer=None):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    parts = {"normalizer": normalizer, "decoder": decoder, "post_processor": post_processor}
    parts["pre_tokenizer"] = pre_tokenizer
    for name, part in parts.items():
        if part is not None:
            setattr(tokenizer, name, part)
    return tokenizer


def template(text, ids=(1,)):
    return TEMPLATE(single=text, special_tokens=[{"id": "<s>", "ids": list(ids), "tokens": ["<s>"] * len(ids)}])


def charsmap(*texts):
    """A map of characters with a trie of no entries."""
    content = struct.pack("<I", 4) + bytes(4) + b"".join(text.encode() + b"\0" for text in texts)
    return forms.Precompiled(content)


MULTIPLY = {
    "doubled 40 times": (made(forms.Sequence([REPLACE("a", "aa")] * 40)), "normalizer Replace"),
    "one long": (made(REPLACE("a", "b" * 100_000)), "normalizer Replace"),
    "nested": (made(forms.Sequence([forms.Sequence([REPLACE(" ", "b" * 9)]), REPLACE("b", "c" * 9)])), "with 1 other"),
    "between characters": (made(REPLACE(Regex("x*"), "b" * 64)), "normalizer Replace"),
    "before each": (made(REPLACE(Regex("(?=.)"), "b" * 64)), "normalizer Replace"),
    "at no character": (made(REPLACE("", "b" * 64)), "normalizer Replace"),
    "bytes of bytes": (made(forms.Sequence([forms.ByteLevel()] * 20)), "normalizer ByteLevel"),
    "and split": (made(pre_tokenizer=splitters.Sequence([splitters.ByteLevel()] * 20)), "pre-tokenizer ByteLevel"),
    "prepended": (made(forms.Prepend("▁" * 65)), "normalizer Prepend"),
    "decoded": (made(decoder=decoders.Sequence([decoders.Replace("a", "aa")] * 7)), "decoder Replace"),
    "text twice": (made(post_processor=template("$A $A")), "2 times"),
    "thousands": (made(post_processor=template(" ".join(["$A"] * 3000))), "3,000 times"),
    "in a sequence": (made(post_processor=processors.Sequence([template("$A $A")] * 3)), "2 times"),
    "many special": (made(post_processor=template("<s> $A", range(2000))), "2,000 tokens"),
}


@pytest.mark.parametrize("kind", MULTIPLY)
def test_what_multiplies_is_refused_by_name(kind):
    tokenizer, named = MULTIPLY[kind]
    with pytest.raises(InputError, match=named):
        check_growth(tokenizer)


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(),
        made(forms.Sequence([forms.Prepend("▁"), REPLACE(" ", "▁")])),
        # ALBERT's and XLM-R's.
        made(
            forms.Sequence(
                [REPLACE("``", '"'), REPLACE("''", '"'), forms.NFKD(), forms.StripAccents(), forms.Lowercase()]
            )
        ),
        made(forms.Sequence([forms.Nmt(), forms.NFKC(), REPLACE(Regex(" {2,}"), " ")])),
        made(forms.Sequence([REPLACE(Regex(r"\s+"), "▁"), REPLACE("\n", "<0x0A>"), REPLACE(Regex("^x"), "")])),
        made(forms.Sequence([forms.NFC(), forms.ByteLevel()]), decoders.Sequence([decoders.ByteLevel()] * 4)),
        made(pre_tokenizer=splitters.Sequence([splitters.Digits(), splitters.ByteLevel()])),
        made(pre_tokenizer=splitters.Sequence([splitters.Split(Regex(one), "isolated") for one in _LOCAL_PATTERNS])),
        made(decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
        made(post_processor=template("<s> $A <s>")),
        made(post_processor=processors.RobertaProcessing(("<s>", 1), ("<s>", 1))),
    ],
)
def test_what_is_in_use_is_not(tokenizer):
    check_growth(tokenizer)


@pytest.mark.parametrize("expression", ["a*a*a*[bc]|a", r"\w*\w*\w*!|.", "(?:ab)*(?:ab)*(?:ab)*c|."])
def test_expressions_that_take_long_are_refused(expression):
    splitter = splitters.Split(Regex(expression), "isolated")
    for parts in ({"pre_tokenizer": splitter}, {"normalizer": REPLACE(Regex(expression), "")}):
        with pytest.raises(InputError, match="the expression"):
            check_growth(made(**parts))


def test_the_longest_text_of_a_map_of_characters_counts():
    check_growth(made(charsmap("صلى الله عليه وسلم", "a")))
    with pytest.raises(InputError, match="normalizer Precompiled"):
        check_growth(made(charsmap("a", "b" * (MOST_GROWTH**2 + 1))))


@pytest.mark.parametrize(
    ("tokenizer", "named"),
    [
        (made(forms.Sequence([forms.NFC()] * 300)), "300 steps"),
        (Tokenizer(models.WordLevel({"a" * 65: 0}, unk_token="a" * 65)), "unknown token has 65"),
        (Tokenizer(models.WordPiece({"a": 0}, unk_token="a", max_input_chars_per_word=10**9)), "words of 1,000"),
    ],
)
def test_what_takes_long_is_refused(tokenizer, named):
    with pytest.raises(InputError, match=named):
        check_growth(tokenizer)
