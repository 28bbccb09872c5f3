"""Tokenises long texts a window at a time, in memory that does not grow with them, to the ids of the whole text.

The library keeps some 170 bytes for every byte of a text that it tokenises at once. So a long text is read through
windows that overlap, and cut inside of each overlap, at a place where what stands on one side has no influence on the
tokens of the other. There are two kinds of such places.

Between words. Pre-tokenizers split a text into words, whose tokens do not depend on each other. A space between two
letters or digits, a line end before one, and a comma or the like between two is where all pre-tokenizers in use begin
a new word or none, whatever stands further away; so if both windows begin one there, the whole text does.

Inside of a word, for BPE, because there are tokenizers whose texts are one word. Tokens are those of the whole word if
each neighbouring two of them are what the joined text of these two becomes: a merge across their boundary that comes
before the others would come so in the word of these two, too. So if a token stands in the tokens of both windows, those
of the first before it and those of the second after it are the tokens of both together.

Both only hold for normalizers and pre-tokenizers that decide by what is near, and so for those which are known here. A
text in which there is no such place is tokenised as a whole if it is not too long.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from moe_jax.core.errors import InputError
from moe_jax.data.tokens.token_bytes import CHARACTER_OF_BYTE
from moe_jax.data.tokens.tokenizer_bounds import components

WINDOW = 1 << 16
"""Characters of a window."""
OVERLAP = 1 << 12
"""Characters of an overlap, at least."""
MOST_UNCUT = 1 << 24
"""Most characters that are tokenised at once where they cannot be cut."""
_SHORT = 4096  # characters that are tokenised in no time


class Encoded(NamedTuple):
    """The tokens of a text: ids UInt32[n], and begin and end of what each stands for, in characters, Int32[n, 2]."""

    ids: np.ndarray
    offsets: np.ndarray


# A letter or a digit is `[^\W_]`. Nothing is composed with the character before it at any of these places.
_BETWEEN_WORDS = re.compile(r"(?<=[^\W_])(?=[ ,;，。、；！？][^\W_])|(?<=\S\n)(?=[^\W_])")
# What a token that both windows have must consist of, and the two characters on both sides of it: nothing but a space
# between words has an influence here on how normalizers and pre-tokenizers treat it.
_LETTERS = re.compile(r"[A-Za-z]+")
_WORDS = re.compile(r"(?: ?[A-Za-z0-9])+ ?")

# None of these finds a space or a comma after a letter, or looks further than one character, except over white space.
_OPENAI = r"'s|'t|'re|'ve|'m|'ll|'d"
_AFTER_LETTERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS_TOGETHER = (
    rf"{_OPENAI}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    *(
        rf"(?i:{_OPENAI})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}|{_AFTER_LETTERS}"
        for number in (r"\p{N}", r"\p{N}{1,3}", r"\p{N}{1,2}")
    ),
)
"""Patterns for which letters are one word however many they are: of GPT-2; Qwen, Llama 3 and cl100k."""
_LOCAL_PATTERNS = (
    *_LETTERS_TOGETHER,
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_OPENAI})?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_OPENAI})?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    *(r"[\r\n]", r"\s+$", r"\p{N}{1,3}", r"[一-龥ࠀ-一가-퟿]+", r"[一-龥぀-ゟ゠-ヿ]+", r"[0-9][0-9][0-9]", r"[0-9]"),
)
"""And those of o200k, Bloom, DeepSeek and Falcon."""
_LOCAL_REPLACED = (" {2,}", r"\s+", r"\s{2,}", r"\n", r"\r\n")
_LOCAL_NORMALIZERS = frozenset(
    "NFC NFD NFKC NFKD Lowercase StripAccents Nmt BertNormalizer Precompiled ByteLevel Strip Prepend".split()
)
_LOCAL_PRE_TOKENIZERS = frozenset(
    "ByteLevel Whitespace WhitespaceSplit BertPreTokenizer Metaspace Punctuation Digits CharDelimiterSplit "
    "UnicodeScripts".split()
)


class LongTexts:
    """Tokenises texts of any length as the library would, without special tokens.

    Args:
      tokenizer: neither truncates nor pads, and has no dropout.
      window, overlap: characters of a window, and of the part that it has in common with the next.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, window: int = WINDOW, overlap: int = OVERLAP):
        self._tokenizer, self._window = tokenizer, window
        longest = max((len(token.content) for token in tokenizer.get_added_tokens_decoder().values()), default=0)
        # A window sees every token of its own (`<|im_end|>`) that comes near a cut.
        self._overlap = max(overlap, 4 * longest)
        normalizers = components(tokenizer.normalizer, "normalizers")
        splitters = components(tokenizer.pre_tokenizer, "pretokenizers")
        is_local = all(map(_is_local_normalizer, normalizers)) and all(map(_is_local_splitter, splitters))
        self._can_cut = is_local and 2 * self._overlap <= window
        of_bytes = any(state["type"] == "ByteLevel" for state in (*normalizers, *splitters))
        self._in_words = _in_words(tokenizer.model, splitters, of_bytes)
        lost = (byte for byte, character in CHARACTER_OF_BYTE.items() if tokenizer.token_to_id(character) is None)
        self._lost = bytes(lost) if of_bytes else b""

    def __call__(self, text: str) -> Encoded:
        """Returns the tokens of a text.

        Raises:
          InputError: if it is long and cannot be cut.
        """
        if len(text) <= self._window or not self._can_cut:
            whole = self._uncut(text)
            return Encoded(whole.ids, whole.offsets)
        parts = list(self._parts(text))
        return Encoded(np.concatenate([part.ids for part in parts]), np.concatenate([part.offsets for part in parts]))

    def _parts(self, text: str) -> Iterator[Encoded]:
        """Yields the tokens of parts of a text, in order."""
        begin, end, first = 0, self._window, 0  # of the window; and the first of its tokens that are still to come
        left = self._window_of(text, begin, end)
        while end < len(text):
            start = end - self._overlap
            right = self._window_of(text, start, start + self._window)
            cut = self._cut(text, left, right)
            if cut is None:
                # A longer window may end where the text can be cut.
                end = min(begin + 2 * (end - begin), len(text))
                left = self._window_of(text, begin, end)
                continue
            yield Encoded(left.ids[first : cut[0]], left.offsets[first : cut[0]])
            first, begin, end, left = cut[1], start, start + self._window, right
        yield Encoded(left.ids[first:], left.offsets[first:])

    def _cut(self, text: str, left: "_Window", right: "_Window") -> tuple[int, int] | None:
        """Returns how many tokens of the left window come before a cut and of the right one are left out, if any."""
        start, end = right.begin, left.end
        inner = start + self._overlap // 4, end - self._overlap // 4
        places = [match.start() for match in _BETWEEN_WORDS.finditer(text, start + 1, end - 1)]
        for place in places[:-1]:  # the word that begins at the cut ends in both windows
            if inner[0] <= place <= inner[1] and (cuts := (left.word_at(place), right.word_at(place)))[0] and cuts[1]:
                if left.tokens(cuts[0] - 1, cuts[0] + 1) == right.tokens(cuts[1] - 1, cuts[1] + 1):
                    return cuts[0], cuts[1]
        if self._in_words is None or self._loses(text[left.begin : right.end]):
            return None
        known = {token: index for index, token in enumerate(right.tokens(0, right.first_after(end)))}
        first, last = map(left.first_after, inner)
        for index, token in enumerate(left.tokens(first, last), start=first):
            other = known.get(token, 0)
            is_shared = left.stands_alone(index) and right.stands_alone(other)
            if is_shared and self._in_words.fullmatch(text, token[1] - 2, token[2] + 2):
                return index, other
        return None

    def _loses(self, text: str) -> bool:
        """Whether bytes of a text have no token: the library leaves them out, and counts from the wrong place then."""
        return bool(self._lost) and len(content := text.encode()) > len(content.translate(None, self._lost))

    def _window_of(self, text: str, begin: int, end: int) -> "_Window":
        return self._uncut(text[begin:end]).at(begin, min(end, len(text)))

    def _uncut(self, text: str) -> "_Window":
        if len(text) > max(MOST_UNCUT, self._window):
            raise InputError(
                f"a text has {len(text):,} characters which cannot be tokenised in parts, {MOST_UNCUT:,} are the most: "
                "divide it, best where a document or a sentence ends"
            )
        encoding = self._encoding(text)
        words = [-1 if word is None else word for word in encoding.word_ids]
        offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        return _Window(np.array(encoding.ids, np.uint32), offsets, np.array(words, np.int32))

    def _encoding(self, text: str) -> tokenizers.Encoding:
        if len(text) <= _SHORT:
            return self._tokenizer.encode(text, add_special_tokens=False)
        # While the library encodes a batch, other threads of Python go on.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]


class _Window:
    """The tokens of a text from `begin` to `end`; `words` Int32[n] has the same number for all tokens of a word."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, words: np.ndarray, begin: int = 0, end: int = 0):
        self.ids, self.offsets, self._words, self.begin, self.end = ids, offsets, words, begin, end
        # Tokens that a normalizer puts in share their characters with the next one.
        self._ends = np.maximum.accumulate(offsets[:, 1])
        self._begins = np.minimum.accumulate(offsets[::-1, 0])[::-1]

    def at(self, begin: int, end: int) -> "_Window":
        """Returns the same tokens as those of this part of a text."""
        return _Window(self.ids, self.offsets + np.int32(begin), self._words, begin, end)

    def first_after(self, place: int) -> int:
        """Returns the index of the first token of those that stand for nothing before a place in the text."""
        return int(np.searchsorted(self._begins, place))

    def word_at(self, place: int) -> int:
        """Returns the index of the first token after a place in the text, 0 unless it begins a word there."""
        index = self.first_after(place)
        if not 0 < index < len(self.ids) or self._ends[index - 1] > place:
            return 0
        return index if self._words[index - 1] != self._words[index] else 0

    def stands_alone(self, index: int) -> bool:
        """Whether a token has others on both sides, and characters that it shares with none."""
        if not 0 < index < len(self.ids) - 1:
            return False
        begin, end = self.offsets[index]
        return self._ends[index - 1] <= begin < end <= self._begins[index + 1]

    def tokens(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Returns for some tokens their id, and begin and end of what they stand for."""
        firsts, lasts = self.offsets[begin:end].T.tolist()
        return list(zip(self.ids[begin:end].tolist(), firsts, lasts, strict=True))


def _is_local_normalizer(state: Mapping[str, Any]) -> bool:
    if state["type"] != "Replace":
        return state["type"] in _LOCAL_NORMALIZERS
    pattern = state["pattern"]
    if "String" in pattern:
        return not any(character.isalnum() for character in pattern["String"])
    return pattern["Regex"] in _LOCAL_REPLACED


def _is_local_splitter(state: Mapping[str, Any]) -> bool:
    if state["type"] != "Split":
        return state["type"] in _LOCAL_PRE_TOKENIZERS
    pattern = state["pattern"]
    return pattern.get("String") == " " or pattern.get("Regex") in _LOCAL_PATTERNS


def _in_words(model: Any, splitters: Sequence[Mapping[str, Any]], of_bytes: bool) -> re.Pattern[str] | None:
    """Returns the pattern for places inside of words where a text can be cut; None: there are none."""
    if not isinstance(model, tokenizers.models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if model.ignore_merges:  # a word that is a token is not joined from others
        return None
    if model.unk_token is None and not of_bytes:  # any character may have no token: see `_loses`
        return None
    if all(_leaves_texts_whole(state) for state in splitters):
        return _WORDS
    patterns = (state["pattern"].get("Regex") for state in splitters if state["type"] == "Split")
    return _LETTERS if all(pattern is None or pattern in _LETTERS_TOGETHER for pattern in patterns) else None


def _leaves_texts_whole(state: Mapping[str, Any]) -> bool:
    if state["type"] == "Split":
        return "String" in state["pattern"]
    return state.get("use_regex") is False or state.get("split") is False
