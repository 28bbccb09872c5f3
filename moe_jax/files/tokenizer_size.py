"""Refuses a tokenizer.json for which its library would take far more memory than for its vocabulary.

The library makes of JSON up to 150 times its size, of regular expressions a thousand times, and of a text in a Unigram
vocabulary a chain that ends the process where it is long. So the file is measured before, without being parsed.
"""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from moe_jax.core.errors import InputError, shown
from moe_jax.files.json_toml import ANYTHING, parse_json

MOST_PARTS = 1 << 16
"""Bytes of all parts but the vocabulary: normalizer, post-processor and the like. Those in use have a few thousand."""
MOST_CHARSMAP = 1 << 20
"""Bytes of SentencePiece's map of characters, which comes on top of these; that in use has a third."""
MOST_VALUES = 4_000_000
"""Commas and brackets of a vocabulary with its merges: those of a million tokens and a million merges."""
MOST_TOKEN = 1 << 14
"""Bytes of the text of one token."""
MOST_LONG = 1 << 19
"""Bytes of all texts of tokens that have more than a thousand."""
MOST_ADDED = 1 << 22
"""Bytes of the texts of all added tokens."""
MOST_PIECES = 1 << 24
"""Bytes of the texts of all tokens of a Unigram vocabulary."""
MOST_CHAIN = 256
"""Tokens of a Unigram vocabulary each of which is the beginning of the next; all are tried at each character."""
_MOST_SETTINGS = 1 << 10  # bytes of a model without vocabulary and merges
_MOST_OBJECTS = 1 << 18  # braces of vocabulary, merges and added tokens
_MOST_MEMBERS = 64
_LEVELS = 12  # of brackets in a part; a template in a sequence has six

_STRING = rb'"(?:[^"\\]++|\\.)*+"'


def _nested(levels: int) -> bytes:
    """Returns the pattern of what stands in brackets that are nested so deep. It never goes back."""
    inside = rb""
    for _ in range(levels):
        deeper = rb"|[\[{]" + inside + rb"[\]}]" if inside else b""
        inside = rb"(?:" + _STRING + rb'|[^"\[\]{}]++' + deeper + rb")*+"
    return inside


_OPENING = re.compile(rb"\s*+{(\s*+})?+")
_KEY = re.compile(rb"\s*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_VALUE = re.compile(_STRING + rb"|[\[{]" + _nested(_LEVELS) + rb'[\]}]|[^"\[\]{},\s]++', re.DOTALL)
_NEXT = re.compile(rb"\s*+([,}])")
_TEXT = re.compile(_STRING, re.DOTALL)
# What stands ahead is there because it fails fast: nearly all texts are short.
_LONG = re.compile(rb'"(?!(?:[^"\\]{1,16}+|\\.){0,60}+")(?:[^"\\]|\\.){1024,}+(?=")', re.DOTALL)
_RATHER_LONG = re.compile(rb'"(?!(?:[^"\\]{1,16}+|\\.){0,7}+")(?:[^"\\]|\\.){128,}+(?=")', re.DOTALL)
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*+:\s*+"([^"\\]*+)"')
_OF_ADDED = frozenset(
    f'"{name}"'.encode() for name in "id content single_word lstrip rstrip normalized special".split()
)

Span = tuple[int, int]
Members = dict[bytes, list[Span]]
"""The places of values in an object, by their keys, which have quotes and may be there more than once."""


def check_size(content: bytes) -> None:
    """Raises `InputError` if a tokenizer.json is none, or has parts that no tokenizer needs so large."""
    models: list[Members] = []
    try:
        parts, _ = _members(content, 0, models)
    except _NoObject:
        parse_json(content, where="it", allow=ANYTHING)
        raise InputError(
            f"it is no object of at most {_MOST_MEMBERS} parts, nested at most {_LEVELS} levels deep"
        ) from None
    added = parts.pop(b'"added_tokens"', [])
    _check_rest(content, parts)
    vocabulary, merges = (
        [one for model in models for one in model.pop(name, [])] for name in (b'"vocab"', b'"merges"')
    )
    _at_most(sum(map(_size, models)), _MOST_SETTINGS, "bytes in the model besides its vocabulary")
    _at_most(_count(content, [*vocabulary, *merges], b",[{"), MOST_VALUES, "values in the vocabulary")
    _at_most(_count(content, [*vocabulary, *merges, *added], b"{"), _MOST_OBJECTS, "objects among the tokens")
    long = [len(match[0]) for span in (*vocabulary, *added) for match in _LONG.finditer(content, *span)]
    _at_most(max(long, default=0), MOST_TOKEN, "bytes in one token")
    _at_most(sum(long), MOST_LONG, "bytes in long tokens")
    _at_most(_texts(content, added, MOST_ADDED), MOST_ADDED, "bytes in the added tokens")
    pieces = [span for span in vocabulary if content.startswith(b"[", span[0])]
    _at_most(_texts(content, pieces, MOST_PIECES), MOST_PIECES, "bytes in the tokens of the vocabulary")
    _at_most(_longest_chain(content, pieces), MOST_CHAIN, "tokens that begin with each other")


class _NoObject(Exception):
    """There is no object of JSON, or one of too many members."""


def _members(content: bytes, start: int, models: list[Members] | None = None) -> tuple[Members, int]:
    """Returns the members of the object that begins at a place, and where it ends; raises `_NoObject`.

    Its models, if they are objects, are put into `models` instead.
    """
    members: Members = {}
    sign = _matched(_OPENING, content, start)
    position, closes = sign.end(), sign[1] is not None
    for _ in range(_MOST_MEMBERS):
        if closes:
            return members, position
        key = _matched(_KEY, content, position)
        if models is not None and key[1] == b'"model"' and content.startswith(b"{", key.end()):
            model, position = _members(content, key.end())
            models.append(model)
        else:
            value = _matched(_VALUE, content, key.end())
            members.setdefault(key[1], []).append(value.span())
            position = value.end()
        sign = _matched(_NEXT, content, position)
        position, closes = sign.end(), sign[1] == b"}"
    raise _NoObject


def _matched(pattern: re.Pattern[bytes], content: bytes, start: int) -> re.Match[bytes]:
    match = pattern.match(content, start)
    if match is None:
        raise _NoObject
    return match


def _check_rest(content: bytes, parts: Members) -> None:
    """Checks what is neither the model nor the added tokens."""
    maps = sum(len(one[1]) for spans in parts.values() for span in spans for one in _CHARSMAP.finditer(content, *span))
    _at_most(maps, MOST_CHARSMAP, "bytes in the map of characters")
    largest = max(parts, key=lambda name: _size({name: parts[name]}), default=b"")
    named = shown(largest.decode(errors="replace").strip('"'))
    _at_most(_size(parts) - maps, MOST_PARTS, f"bytes besides the vocabulary, most of them in {named}")
    for begin, end in (span for spans in parts.values() for span in spans):
        try:
            json.loads(content[begin:end], object_pairs_hook=_check_charsmaps)
        except InputError:
            raise
        except ValueError:
            pass  # the library refuses it


def _check_charsmaps(pairs: Sequence[tuple[str, Any]]) -> None:
    """Checks that a map of characters has the trie that it says it has, for which the library makes room."""
    for encoded in (value for key, value in pairs if key == "precompiled_charsmap" and isinstance(value, str)):
        charsmap = base64.b64decode(encoded)
        size = int.from_bytes(charsmap[:4], "little")
        if size > len(charsmap) - 4:
            raise InputError(f"the map of characters has {len(charsmap):,} bytes, too few for its trie of {size:,}")


def _size(members: Members) -> int:
    """Returns the bytes of members with their keys."""
    return sum(len(name) + sum(end - begin for begin, end in spans) for name, spans in members.items())


def _count(content: bytes, spans: Sequence[Span], signs: bytes) -> int:
    return sum(content.count(sign, *span) for span in spans for sign in signs)


def _texts(content: bytes, spans: Sequence[Span], enough: int) -> int:
    """Returns the bytes of the texts in parts of a file; a part of them if it is more than `enough`."""
    if sum(end - begin for begin, end in spans) <= enough:
        return 0  # they cannot be more
    size = 0
    for text in _found(content, spans):
        size += len(text)
        if size > enough:
            break
    return size


def _found(content: bytes, spans: Sequence[Span]) -> Iterator[bytes]:
    matches = (match[0] for span in spans for match in _TEXT.finditer(content, *span))
    return (text for text in matches if text not in _OF_ADDED)


def _longest_chain(content: bytes, spans: Sequence[Span]) -> int:
    """Returns the most tokens each of which begins the next, those of at most 128 bytes as if all were such."""
    texts = sorted(match[0] for span in spans for match in _RATHER_LONG.finditer(content, *span))
    longest, chain = 0, []
    for text in dict.fromkeys(texts):
        while chain and not text.startswith(chain[-1]):
            chain.pop()
        chain.append(text)
        longest = max(longest, len(chain))
    return longest + 128


def _at_most(number: int, most: int, of_what: str) -> None:
    if number > most:
        raise InputError(f"it has {number:,} {of_what}, {most:,} are the most")
