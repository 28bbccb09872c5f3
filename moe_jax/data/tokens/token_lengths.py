"""How long a text can be that has few tokens, so that one that has too many need not be tokenised to say so."""

from collections.abc import Mapping
from typing import Any

import tokenizers

from moe_jax.data.tokens.token_bytes import CHARACTER_OF_BYTE
from moe_jax.data.tokens.tokenizer_bounds import components

# A text has no fewer characters after these steps, but that up to four are composed to one.
_KEEPS_ALL = (
    "ByteLevel",
    "Digits",
    "FixedLength",
    "Lowercase",
    "Metaspace",
    "NFD",
    "NFKD",
    "Prepend",
    "UnicodeScripts",
)
_COMPOSES = ("NFC", "NFKC")
_MOST_COMPOSED = 4


def most_characters(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Returns how many characters of a text become one token at most; None: there is no bound, or it is not known.

    There is none where characters are left out, or many that the vocabulary does not have become one token. Blanks
    that special tokens take from the text beside them do not count.
    """
    normalizers = components(tokenizer.normalizer, "normalizers")
    steps = [*normalizers, *components(tokenizer.pre_tokenizer, "pretokenizers")]
    vocab = tokenizer.get_vocab()
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        needed = CHARACTER_OF_BYTE.values()
    else:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
        if not getattr(tokenizer.model, "byte_fallback", False):
            return None
    if not all(map(vocab.__contains__, needed)) or not all(map(_keeps_all, steps)):
        return None
    return max(map(len, vocab)) * (_MOST_COMPOSED if kinds & set(_COMPOSES) else 1)


def _keeps_all(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(step["content"]) >= len(replaced)
    if kind in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return kind in _KEEPS_ALL or kind in _COMPOSES
