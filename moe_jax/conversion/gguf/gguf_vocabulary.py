"""Converts the tokenizer in a GGUF file's metadata to tokenizer.json and tokenizer_config.json.

Two kinds are known. `gpt2`: BPE over bytes, with merges; `tokenizer.ggml.pre` names the way in which a text is cut into
pieces, and where it has no name, the whole tokenizer.json may be there, too. `llama`: SentencePiece's BPE over
characters, without merges but with a score for every token, and bytes for characters without a token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from moe_jax.conversion.gguf.gguf_cuts import PIECES, cutter
from moe_jax.core.errors import InputError, first_sentence, nearest, shown
from moe_jax.data.tokenizer import parse_tokenizer

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
WHOLE = "tokenizer.huggingface.json"
DEFAULT = "default"  # name of the cuts of a text that have no name
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_MAX_PIECE = 512  # characters of a token that merges are looked for in
SPACE = "\u2581"
_Made = tuple[tokenizers.Tokenizer, dict[str, bool]]  # and whether BOS and EOS are added if the file does not say


def tokenizer_of(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Returns the contents of tokenizer.json, as text, and of tokenizer_config.json; None if there is no tokenizer.

    Raises:
      InputError: for an unknown kind of tokenizer, or one whose parts do not fit together.
    """
    kind = metadata.get(MODEL)
    if kind in (None, "none", "no_vocab"):
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(f"{MODEL} is {shown(kind)}, known are {', '.join(_KINDS)}{_WAY_OUT}")
    vocabulary = Vocabulary.of(metadata)
    whole = metadata.get(WHOLE)
    if metadata.get(PRE) == DEFAULT and isinstance(whole, str):
        parse_tokenizer(whole.encode(), WHOLE)
        return whole, _settings(metadata, vocabulary, {"bos": False, "eos": False})
    try:
        made, defaults = _KINDS[kind](metadata, vocabulary)
        _add_tokens(made, vocabulary)
        settings = _settings(metadata, vocabulary, defaults)
        _add_edges(made, settings, vocabulary)
        return made.to_str(pretty=False), settings
    except BaseException as error:
        # The library raises bare `Exception`; a panic of its Rust code is not even that, and has no public name.
        expected = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, InputError) or not expected:
            raise
        raise InputError(f"its tokens and merges make no tokenizer: {first_sentence(error)}") from None


_WAY_OUT = "; convert the checkpoint that the file was made of, which has a tokenizer.json"


class Vocabulary(NamedTuple):
    """Tokens in the order of their ids, and the type of each."""

    tokens: list[str]
    types: list[int]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        tokens = metadata.get(TOKENS)
        if not isinstance(tokens, list) or not tokens:
            raise InputError(f"{TOKENS} is {shown(tokens)}, expected a list of tokens")
        types = _numbers(metadata, TYPES, len(tokens), default=NORMAL)
        return cls(tokens, types.astype(np.int64).tolist())

    def ids(self) -> dict[str, int]:
        """Id of every token that a text can have."""
        found = {token: i for i, token in enumerate(self.tokens) if self.types[i] != UNUSED}
        if len(found) < len(self.tokens) - self.types.count(UNUSED):
            twice = next(token for i, token in enumerate(self.tokens) if found.get(token, i) != i)
            raise InputError(f"{TOKENS} holds {shown(twice)} twice")
        return found

    def of_type(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


# --- bytes ----------------------------------------------------------------------------------------


def _byte_tokenizer(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> _Made:
    pre = metadata.get(PRE)
    if not isinstance(pre, str) or pre not in PIECES:
        hint = nearest(pre, PIECES) if isinstance(pre, str) else ""
        raise InputError(f"{PRE} is {shown(pre)}{hint}, known are {', '.join(PIECES)}{_WAY_OUT}")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise InputError(f"tokenizer.ggml.merges is {shown(merges)}, expected a list of pairs of tokens")
    pieces = PIECES[pre]
    # A token has a space only at its beginning, where it is written as another character.
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if bad := next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None):
        raise InputError(f"tokenizer.ggml.merges holds {shown(bad)}, which is no pair of tokens")
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids(), merges=pairs, ignore_merges=pieces.ignore_merges)  # pyright: ignore
    )
    if pieces.normalizer is not None:
        made.normalizer = pieces.normalizer
    made.pre_tokenizer = cutter(pieces)
    made.decoder = decoders.ByteLevel()
    return made, {"bos": pieces.add_bos, "eos": False}


# --- characters -----------------------------------------------------------------------------------


def _character_tokenizer(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> _Made:
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(vocabulary.tokens))
    ids = vocabulary.ids()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=scored_merges(vocabulary, scores, ids),
            unk_token=_token(vocabulary, unknown, "tokenizer.ggml.unknown_token_id"),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    spaces = [normalizers.Replace(" ", SPACE)]
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return made, {"bos": True, "eos": False}


def scored_merges(vocabulary: Vocabulary, scores: np.ndarray, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns merges that join tokens in the order of their scores, each from every two tokens that it consists of."""
    found: list[tuple[float, int, int, str, str]] = []
    for i, token in enumerate(vocabulary.tokens):
        if vocabulary.types[i] != NORMAL or len(token) > _MAX_PIECE:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-float(scores[i]), left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(found, key=lambda merge: merge[:3])]


_KINDS = {"gpt2": _byte_tokenizer, "llama": _character_tokenizer}

# --- both -----------------------------------------------------------------------------------------


def _add_tokens(made: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Adds tokens that are found in a text before it is cut. Special ones are left out of decoded text."""
    special, others = vocabulary.of_type(CONTROL, UNKNOWN), vocabulary.of_type(USER_DEFINED)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in others])


def _settings(metadata: Mapping[str, Any], vocabulary: Vocabulary, defaults: Mapping[str, bool]) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for edge, default in defaults.items():
        key = f"tokenizer.ggml.add_{edge}_token"
        value = metadata.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{key} is {shown(value)}, expected true or false")
        settings[f"add_{edge}_token"] = value
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        key = f"tokenizer.ggml.{key}_token_id"
        if metadata.get(key) is not None:
            settings[f"{name}_token"] = _token(vocabulary, metadata[key], key)
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise InputError(f"tokenizer.chat_template is {shown(template)}, expected a text")
    return settings if template is None else settings | {"chat_template": template}


def _add_edges(made: tokenizers.Tokenizer, settings: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Adds BOS before a text and EOS after it, if the settings say so and there are such tokens."""
    edges = {edge: settings.get(f"{edge}_token") if settings[f"add_{edge}_token"] else None for edge in ("bos", "eos")}
    used = {token: vocabulary.tokens.index(token) for token in edges.values() if token is not None}
    if used:
        one, other = ([edges["bos"], text, edges["eos"]] for text in ("$A", "$B:1"))
        single, pair = ([part for part in parts if part is not None] for parts in (one, one + other))
        made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(used.items()))


def _numbers(metadata: Mapping[str, Any], key: str, count: int, default: int | None = None) -> np.ndarray:
    """Returns an array of `count` finite numbers."""
    values = metadata.get(key)
    if values is None and default is not None:
        return np.full(count, default)
    if not isinstance(values, np.ndarray) or len(values) != count or not np.isfinite(values).all():
        raise InputError(f"{key} is {shown(values)}, expected {count:,} numbers, one for each token")
    return values


def _token(vocabulary: Vocabulary, number: Any, key: str) -> str:
    if type(number) is not int or not 0 <= number < len(vocabulary.tokens):
        raise InputError(f"{key} is {shown(number)}, but there are {len(vocabulary.tokens):,} tokens")
    return vocabulary.tokens[number]
