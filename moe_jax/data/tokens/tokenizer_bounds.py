"""Refuses a tokenizer.json whose parts multiply what they are given: a few kilobytes that make gigabytes of a text."""

import base64
import binascii
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from moe_jax.core.errors import InputError, shown

MOST_GROWTH = 64
"""Most characters that normalizers make of one, and decoders of one of a token. Those of SentencePiece make 18."""
MOST_STEPS = 256
"""Normalizers, pre-tokenizers, decoders and the like of a tokenizer; each reads the whole text, and ten are many."""
MOST_WORD = 256
"""Characters of a word that WordPiece divides, in time that grows with their cube; BERT's has 100."""
_MOST_ADDED = 1024  # special tokens that a post-processor puts around a text; those in use put four
_SAMPLES = "a~0 \n"
_WORD = re.compile(r"[^\W_]{2,16}")
_MOST_UNITS = 256  # characters and words of an expression that are tried; those in use have fewer
_RUNS = tuple(1 << exponent for exponent in range(4, 11))  # lengths of the texts
_MOST_SECONDS = 0.02  # of processor time; those in use take a thousandth
# What may match where there is no character.
_ZERO_WIDTH = ("^", "$", "(?", "\\b", "\\B", "\\A", "\\z", "\\Z", "\\G", "\\K")


def components(part: Any, members: str) -> list[Mapping[str, Any]]:
    """Returns what a part of a tokenizer says of itself; for a sequence, what each of its `members` does."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__()), members))


def _flat(state: Mapping[str, Any], members: str) -> Iterator[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for member in state[members]:
        yield from _flat(member, members)


def check_growth(tokenizer: tokenizers.Tokenizer) -> None:
    """Raises `InputError` if parts of a tokenizer could make far more of a text than it is, or take far too long."""
    _check_model(tokenizer.model)
    normalizers = components(tokenizer.normalizer, "normalizers")
    splitters = components(tokenizer.pre_tokenizer, "pretokenizers")
    decoders = components(tokenizer.decoder, "decoders")
    processors = components(tokenizer.post_processor, "processors")
    steps = sum(map(len, (normalizers, splitters, decoders, processors)))
    if steps > MOST_STEPS:
        raise InputError(f"the tokenizer has {steps:,} steps, {MOST_STEPS} are the most")
    for state in (*normalizers, *splitters, *decoders):
        if state["type"] in ("Replace", "Split"):
            _check_time(state["pattern"].get("Regex"))
    _check_product("normalizer", normalizers)
    _check_product("pre-tokenizer", splitters)
    _check_product("decoder", [state for state in decoders if state["type"] != "ByteLevel"])
    for state in processors:
        if state["type"] == "TemplateProcessing":
            _check_template(state)


def _check_model(model: Any) -> None:
    unknown = getattr(model, "unk_token", None) or ""
    if len(unknown) > MOST_GROWTH:  # it stands for single characters
        raise InputError(f"the unknown token has {len(unknown):,} characters, {MOST_GROWTH} are the most")
    longest = getattr(model, "max_input_chars_per_word", 0)
    if longest > MOST_WORD:
        raise InputError(f"the model divides words of {longest:,} characters, {MOST_WORD} are the most")


def _check_time(expression: str | None) -> None:
    """Refuses an expression whose time grows with more than the square of one character or word again and again.

    What it takes for other texts is not known.
    """
    if not expression:
        return
    replaced = tokenizers.normalizers.Replace(tokenizers.Regex(expression), "").normalize_str
    for unit in list(dict.fromkeys([*_SAMPLES, *expression, *_WORD.findall(expression)]))[:_MOST_UNITS]:
        for length in _RUNS:
            start = time.thread_time()
            replaced(unit * (length // len(unit)) + "\0")
            if time.thread_time() - start > _MOST_SECONDS:
                raise InputError(
                    f"the expression {shown(expression)} takes more than {_MOST_SECONDS} s in a text of {length + 1} "
                    "characters"
                )


def _check_product(what: str, states: Sequence[Mapping[str, Any]]) -> None:
    growths = [_growth(state) for state in states]
    growth = math.prod(growths)
    if growth <= MOST_GROWTH:
        return
    worst = max(range(len(states)), key=growths.__getitem__)
    others = sum(one > 1 for one in growths) - 1
    together = f", together with {others} other {what}s," if others else ""
    many = f"{growth:,}" if growth < 1_000_000 else "more than a million"
    raise InputError(
        f"the {what} {_named(states[worst])}{together} may make {many} characters of one, {MOST_GROWTH} are the most"
    )


def _named(state: Mapping[str, Any]) -> str:
    if state["type"] == "Replace":
        (pattern,) = state["pattern"].values()
        return f"Replace of {shown(pattern)} by {shown(state['content'])}"
    return f"Prepend of {shown(state['prepend'])}" if state["type"] == "Prepend" else state["type"]


def _growth(state: Mapping[str, Any]) -> int:
    """Returns the most characters that a normalizer, a pre-tokenizer or a decoder makes of one.

    The forms of Unicode count as 1: they make 18 of one at most, and nothing more of what they have made.
    """
    if state["type"] == "Replace":
        return _growth_of_replace(state["pattern"], state["content"])
    if state["type"] == "ByteLevel":  # which writes a character for each byte
        return 4
    if state["type"] == "Prepend":
        return max(1, len(state["prepend"]))
    if state["type"] == "Precompiled":
        return -(-_longest_of_charsmap(state["precompiled_charsmap"]) // MOST_GROWTH) or 1
    return 1


def _growth_of_replace(pattern: Mapping[str, str], content: str) -> int:
    text = pattern.get("String")
    if text:
        return max(1, -(-len(content) // len(text)))
    expression = pattern.get("Regex", "")
    replaced = tokenizers.normalizers.Replace(tokenizers.Regex(expression), "a").normalize_str
    is_between = any(len(replaced(one)) > 1 for one in _SAMPLES) or any(sign in expression for sign in _ZERO_WIDTH)
    # Before and after a token of one character.
    return 2 * len(content) + 1 if is_between and content else max(1, len(content))


def _longest_of_charsmap(encoded: str) -> int:
    """Returns the bytes of the longest text in SentencePiece's map of characters: a trie's size, the trie, the texts.

    See `Normalizer::DecodePrecompiledCharsMap` in https://github.com/google/sentencepiece.
    """
    try:
        charsmap = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return 0  # the library has refused it
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\x00")), default=0)


def _check_template(state: Mapping[str, Any]) -> None:
    texts = sum("Sequence" in piece for piece in state["single"])
    if texts != 1:
        raise InputError(f"the post-processor TemplateProcessing writes a text {texts:,} times, expected once")
    known = state["special_tokens"]
    added = sum(len(known[piece["SpecialToken"]["id"]]["ids"]) for piece in state["single"] if "Sequence" not in piece)
    if added > _MOST_ADDED:
        raise InputError(
            f"the post-processor TemplateProcessing puts {added:,} tokens around a text, {_MOST_ADDED:,} are the most"
        )
