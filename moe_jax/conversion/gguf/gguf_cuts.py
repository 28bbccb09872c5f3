"""How texts are cut into pieces before tokens are made of them, by the names that GGUF files have for it.

Each is the normaliser and pre-tokenizer of the published tokenizer.json of a family. The regular expressions are also
in https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp, which takes runs of digits for single ones
where the vocabulary has no runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"


class Pieces(NamedTuple):
    """How a text is cut into pieces, none of which a token crosses."""

    cut: Sequence[Any] = ()  # the cuts, before bytes become characters
    by_words: bool = False  # whether the usual cuts of GPT-2 follow
    normalizer: Any = None  # applied to a text before; None: there is none
    ignore_merges: bool = False  # a piece that is a token is not put together from smaller ones
    add_bos: bool = False  # whether texts begin with BOS if the file does not say


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_GPT2 = Pieces(by_words=True)
_SMOLLM = Pieces((_DIGITS,), by_words=True)
_LLAMA3 = Pieces((_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),), ignore_merges=True, add_bos=True)
_QWEN2 = Pieces((_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"),), normalizer=normalizers.NFC())

# DeepSeek: Chinese, Japanese and Korean stand apart. The first models have a list of letters with case.
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_WIDE_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_LLM = Pieces(
    (*map(_split, ("[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_WIDE_MARKS}]+", r"\s+$", _HAN)), _DIGITS),
)
_DEEPSEEK_CODER = Pieces((*map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN)), _DIGITS))
_MARK_AND_LETTERS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_WORDS_AND_MARKS = "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
_DEEPSEEK_V3 = Pieces(
    (
        _split(r"\p{N}{1,3}"),
        _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        _split(f"{_MARK_AND_LETTERS}|{_WORDS_AND_MARKS}"),
    )
)

PIECES = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2._replace(normalizer=normalizers.NFC()),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3._replace(ignore_merges=False, add_bos=False),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}


def cutter(pieces: Pieces) -> Any:
    """Returns the library's pre-tokenizer that cuts a text so, and makes characters of its bytes."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pieces.by_words)
    return pre_tokenizers.Sequence([*pieces.cut, by_bytes])
