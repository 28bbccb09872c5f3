"""A tokenizer.json as the metadata of a GGUF file: the inverse of `gguf_vocabulary`."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from moe_jax.conversion.gguf.gguf_cuts import PIECES, cutter
from moe_jax.conversion.gguf.gguf_vocabulary import (
    BYTE,
    CONTROL,
    DEFAULT,
    MODEL,
    NORMAL,
    PRE,
    SPACE,
    TOKENS,
    TYPES,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE,
    Vocabulary,
    scored_merges,
)
from moe_jax.core.errors import InputError, shown
from moe_jax.data.chat_template import find_chat_template, read_settings, special_tokens
from moe_jax.data.tokenizer import parse_tokenizer
from moe_jax.files.tokenizer_files import TOKENIZER, read_tokenizer_file
from moe_jax.models import ModelConfig

_MAX_WHOLE = 16 << 20  # of a text that is read again
_WAY_OUT = "copy the model directory without its tokenizer files, and export that"


def tokenizer_keys(files: Sequence[Path], config: ModelConfig, ends: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """Returns the metadata of a model's tokenizer, and lines about what llama.cpp will do otherwise.

    Args:
      files: that go with the model.
      config: of the model.
      ends: the tokens that end a text.

    Raises:
      InputError: for a tokenizer that is neither BPE over bytes nor BPE over characters, or has more tokens than the
        model.
    """
    file = next((file for file in files if file.name == TOKENIZER), None)
    if file is None:
        return {MODEL: "none"}, ["note: the model has no tokenizer.json, and the file no tokenizer"]
    content = read_tokenizer_file(file)
    made = parse_tokenizer(content, file)
    data = json.loads(made.to_str())  # with what older files leave out
    if data["model"].get("type") != "BPE":
        raise InputError(
            f"{file} is a tokenizer of the type {shown(data['model'].get('type'))}, only BPE is written to GGUF files; "
            f"{_WAY_OUT}"
        )
    vocabulary = _vocabulary(made, data, config.vocab_size, file)
    steps = _flat(data.get("pre_tokenizer"), "pretokenizers")
    if any(step.get("type") == "ByteLevel" for step in steps):
        found, notes = _of_bytes(data, content)
    else:
        found, notes = _of_characters(data, vocabulary)
    if any(token.get(key) for token in data.get("added_tokens") or () for key in ("lstrip", "rstrip", "single_word")):
        notes.append("note: some added tokens take spaces beside them, or stand alone: not so in GGUF files")
    found = {
        **found,
        TOKENS: vocabulary.tokens,
        TYPES: vocabulary.types,
        **_special(made, file, config, ends, notes),
    }
    with contextlib.suppress(InputError):  # exporting is no place to find faults in a template
        template = find_chat_template(file)
        found |= {} if template is None else {"tokenizer.chat_template": template.source}
    return found, notes


def _vocabulary(made: tokenizers.Tokenizer, data: Mapping[str, Any], size: int, file: Path) -> Vocabulary:
    """Returns all tokens by their ids, with their types; embeddings without a token get an unused one."""
    by_id = {number: token for token, number in made.get_vocab(with_added_tokens=True).items()}
    if by_id and max(by_id) >= size:
        raise InputError(f"{file} has the token {max(by_id)}, but the model's vocabulary has {size:,}; {_WAY_OUT}")
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    types = [NORMAL if number in by_id else UNUSED for number in range(size)]
    unknown = data["model"].get("unk_token")
    for token in data.get("added_tokens") or ():
        types[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    if data["model"].get("byte_fallback"):
        for number, token in by_id.items():
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                types[number] = BYTE
            elif token == unknown:
                types[number] = UNKNOWN
    return Vocabulary(tokens, types)


# --- bytes ----------------------------------------------------------------------------------------


def _of_bytes(data: Mapping[str, Any], content: bytes) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {MODEL: "gpt2", PRE: DEFAULT, "tokenizer.ggml.merges": _merges(data)}
    cuts, normalizer = _flat(data.get("pre_tokenizer"), "pretokenizers"), _flat(data.get("normalizer"), "normalizers")
    ignores = bool(data["model"].get("ignore_merges"))
    alike = [name for name, pieces in PIECES.items() if pieces.ignore_merges == ignores and _cuts_of(name) == cuts]
    same = [name for name in alike if _normalizer_of(name) == normalizer]
    if same:
        return found | {PRE: same[0]}, []
    if alike:
        return found | {PRE: alike[0]}, ["note: the tokenizer changes texts before it cuts them: llama.cpp does not"]
    if len(content) <= _MAX_WHOLE:
        found[WHOLE] = content.decode()
    why = "the tokenizer cuts texts in a way that has no name in llama.cpp"
    return found, [f"note: {why}, which will cut them as {DEFAULT!r} says: into other tokens, sometimes"]


def _merges(data: Mapping[str, Any]) -> list[str]:
    # Pairs, or of older releases of the library texts.
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]


def _cuts_of(pre: str) -> list[dict[str, Any]]:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = cutter(PIECES[pre])
    return _flat(json.loads(made.to_str())["pre_tokenizer"], "pretokenizers")


def _normalizer_of(pre: str) -> list[dict[str, Any]]:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    if PIECES[pre].normalizer is not None:
        made.normalizer = PIECES[pre].normalizer
    return _flat(json.loads(made.to_str())["normalizer"], "normalizers")


def _flat(step: Mapping[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """Returns the steps of a sequence of steps, without what does not change the tokens."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [one for part in step.get(inside, ()) for one in _flat(part, inside)]
    return [{key: value for key, value in step.items() if key != "trim_offsets"}]


# --- characters -----------------------------------------------------------------------------------


def _of_characters(data: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[dict[str, Any], list[str]]:
    merges = [tuple(merge.split(" ", 1)) for merge in _merges(data)]
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    # Tokens that nothing is merged to, such as single characters, come last.
    scores = [
        0.0 if kind != NORMAL else -float(ranks.get(token, len(ranks) + number))
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    ]
    prefix, notes = _space_prefix(data)
    if scored_merges(vocabulary, np.asarray(scores), vocabulary.ids()) != merges:
        notes.append("note: the tokenizer's merges are not those of scores: llama.cpp may cut some words otherwise")
    return {MODEL: "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": prefix}, notes


def _space_prefix(data: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Returns whether a space stands before a text, and a line if more happens to it that GGUF files cannot say."""
    steps = _flat(data.get("normalizer"), "normalizers")
    cuts = _flat(data.get("pre_tokenizer"), "pretokenizers")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepended = {"type": "Prepend", "prepend": SPACE}
    if not cuts and spaces in steps and all(step in (spaces, prepended) for step in steps):
        return prepended in steps, []
    if not steps and len(cuts) == 1 and cuts[0].get("type") == "Metaspace" and not cuts[0].get("split", True):
        prefix = cuts[0].get("prepend_scheme", "always") != "never"
        return prefix, ["note: GGUF files put a space before texts that begin with one, too"] if prefix else []
    return True, ["note: the tokenizer does more to texts than GGUF files can say: llama.cpp may cut them otherwise"]


# --- both -----------------------------------------------------------------------------------------


def _special(
    made: tokenizers.Tokenizer, file: Path, config: ModelConfig, ends: Sequence[int], notes: list[str]
) -> dict[str, Any]:
    """Returns the numbers of special tokens, and whether BOS and EOS are added to a text."""
    named = special_tokens(read_settings(file.with_name("tokenizer_config.json")))
    ids = {name: made.token_to_id(token) for name, token in named.items()}
    bos = ids.get("bos_token") if config.bos_id is None else config.bos_id
    found = {"bos": bos, "unknown": ids.get("unk_token"), "padding": ids.get("pad_token")}
    found |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    if len(ends) > 3:
        notes.append(f"note: {len(ends)} tokens end a text, of which GGUF files name three")
    with_edges, without = (made.encode("a", add_special_tokens=special).ids for special in (True, False))
    keys: dict[str, Any] = {
        f"tokenizer.ggml.{name}_token_id": token for name, token in found.items() if token is not None
    }
    begins = len(with_edges) > len(without) and with_edges[0] == bos
    ends_too = len(with_edges) > len(without) and with_edges[-1] in ends[:1]
    return keys | {"tokenizer.ggml.add_bos_token": begins, "tokenizer.ggml.add_eos_token": ends_too}
