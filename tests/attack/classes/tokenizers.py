"""tokenizer.json files whose parts make far more of a text than it is, or which take far more memory than they have."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.data.tokenizer import Tokenizer
from tests.attack.attacks import Attack
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config

FILE = "tokenizer.json"
TEXT = "The cat sat on the mat. " * 40 + "a" * 4000
_LENGTHS = (0, 1, 2, 9, 63, 64, 65, 4000)
_SIZES = (1, 99, 5_000, 100_000, 1_000_000)
_NOTHING: tuple[Any, ...] = (0, "", [], {}, [0], {"": 0}, [[]], {"type": "NFC"}, "a" * 99)
_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
_EXPRESSIONS = (
    "(a+)+$", "(a|a)*$", "(?:a*)*b", "(.*)*x", "[\\p{L}\\p{N}]", "(?:a{1000}){1000}", "a?", "(", "\\p{L}+|", "(?i:a)|",
    "\\b", "(?<!a)(?=a)", "a*a*a*[bc]|a", "a*a*[bc]|a", "(?:at )*(?:at )*!|.", "a{99999}", "x*", "",
)  # fmt: skip


def _original() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(byte_tokenizer(Path(folder) / FILE).read_text())


def _replace(rng: random.Random) -> dict[str, Any]:
    pattern = rng.choice(
        (
            {"String": "a"},
            {"String": ""},
            {"String": "at"},
            {"Regex": "a"},
            {"Regex": "x*"},
            {"Regex": "(?=.)"},
            {"Regex": "\\b"},
        )
    )
    return {"type": "Replace", "pattern": pattern, "content": "a" * rng.choice(_LENGTHS)}


def _normalizer(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            _replace(rng),
            {"type": "Prepend", "prepend": "a" * rng.choice(_LENGTHS)},
            {"type": "NFKD"},
            {"type": "Lowercase"},
            {"type": "ByteLevel"},
            {"type": "Strip", "strip_left": True, "strip_right": True},
        )
    )


def _decoder(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            _replace(rng),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            {"type": "WordPiece", "prefix": "a" * rng.choice(_LENGTHS), "cleanup": True},
            {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
        )
    )


def _processor(rng: random.Random) -> dict[str, Any]:
    text, special = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
    single = [text] * rng.choice((0, 1, 1, 2, 3000)) + [special] * rng.choice((0, 1, 3000))
    ids = [256] * rng.choice((1, 2, 10_000))
    known = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": [text], "special_tokens": known}


def _sequence(rng: random.Random, what: str, members: str, one: Any) -> dict[str, Any]:
    parts = [one(rng) for _ in range(rng.choice((1, 1, 2, 40)))]
    parts = parts * rng.choice((1, 1, 3, 20))
    return parts[0] if len(parts) == 1 else {"type": "Sequence", members: parts}


def _many(rng: random.Random, one: Any) -> list[Any]:
    """The same thing again and again, in no more than about four million characters."""
    return [one] * min(rng.choice(_SIZES), 1 + 4_000_000 // (2 + len(json.dumps(one))))


def _words(rng: random.Random) -> dict[str, int]:
    """A vocabulary of few long or many short tokens."""
    long = "a" * min(1_000_000, rng.choice(_SIZES))
    chain = {"a" * i: i for i in range(rng.choice((9, 250, 1000)))}
    return rng.choice(
        (chain, {"a": 0, "##a": 1, "<unk>": 2, long: 3}, {f"{i:x}": i for i in range(rng.choice(_SIZES) // 5)})
    )


def _model(rng: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    words = _words(rng)
    unknown = rng.choice(("a", "<unk>", max(words, default="", key=len)))
    pieces = [[piece, rng.choice((0, -1.5, 1e308))] for piece in words]
    return rng.choice(
        (
            model | {"x": _many(rng, rng.choice(_NOTHING))},
            model | {"merges": _many(rng, rng.choice((["a", "b"], ["a", "a"], "a a", *_NOTHING)))},
            model | {"vocab": _many(rng, rng.choice(_NOTHING))},
            model | {"vocab": words, "merges": []},
            model | {"continuing_subword_prefix": "a" * rng.choice(_SIZES)},
            {"type": "Unigram", "unk_id": rng.choice((0, 10**9, None)), "vocab": pieces, "byte_fallback": False},
            {"type": "Unigram", "unk_id": 0, "vocab": _many(rng, ["", 0]), "byte_fallback": False},
            {"type": "WordLevel", "vocab": words, "unk_token": unknown},
            {"type": "WordPiece", "vocab": words, "unk_token": unknown, "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100},
        )
    )  # fmt: skip


def _part(rng: random.Random, content: dict[str, Any]) -> tuple[str, Any]:
    """A part that is too large, too deep, or slow, whatever it does."""
    name = rng.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    members = {"pre_tokenizer": "pretokenizers", "post_processor": "processors"}.get(name, f"{name}s")
    deep: Any = {"type": "NFC"}
    for _ in range(rng.choice((5, 50, 120))):
        deep = {"type": "Sequence", members: [deep]}
    expression = rng.choice(_EXPRESSIONS) * rng.choice((1, 1, 2, 99, 9999))
    added = {"id": 300, "content": rng.choice("a<") * rng.choice(_SIZES), **_SPECIAL}
    tokens = [added | {"id": 258 + i, "content": f"<{i:x}>"} for i in range(min(40_000, rng.choice(_SIZES)))]
    charsmap = rng.choice(
        ("", "AAAA", "BAAAAAAAAAB", "////", "/////wAAAAA=", "BAAAAP////8AAA==", "A" * 1_500_000, "AQAAAAA" + "A" * 4000)
    )
    return rng.choice(
        (
            (name, deep),
            (name, {"type": "Sequence", members: _many(rng, rng.choice(_NOTHING))}),
            ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated",
                               "invert": rng.random() < 0.5}),
            ("normalizer", {"type": "Replace", "pattern": {"Regex": expression}, "content": "a"}),
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap}),
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap}),
            ("added_tokens", [added]),
            ("added_tokens", tokens),
            ("added_tokens", _many(rng, rng.choice(_NOTHING))),
            ("padding", {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                         "pad_type_id": 0, "pad_token": "a" * rng.choice(_SIZES)}),
            ("truncation", {"max_length": 1, "strategy": "LongestFirst", "stride": 10**9, "direction": "Right"}),
            ("x" * rng.choice(_SIZES), 0),
            ("model", {"type": "WordPiece", "vocab": {"a": 0, "##a": 1, "<unk>": 2}, "unk_token": "<unk>",
                       "continuing_subword_prefix": "##", "max_input_chars_per_word": rng.choice((100, 257, 10**9))}),
            ("model", content["model"] | {"x": _many(rng, {"a": []})}),
            ("model", _model(rng, content["model"])),
            ("model", _model(rng, content["model"])),
        )
    )  # fmt: skip


def _make(rng: random.Random, original: dict[str, Any], folder: Path) -> None:
    content = dict(original)
    if rng.random() < 0.5:
        name, part = _part(rng, content)
        if name == "model" and isinstance(part, dict) and part["type"] == "WordPiece":
            content["pre_tokenizer"] = {"type": "WhitespaceSplit"}  # its words are divided whole
        (folder / FILE).write_text(json.dumps(content | {name: part}))
        return
    kinds = (
        ("normalizer", "normalizers", _normalizer),
        ("decoder", "decoders", _decoder),
        ("post_processor", "processors", _processor),
    )
    for what, members, one in rng.sample(kinds, rng.randint(1, 2)):
        content[what] = _sequence(rng, what, members, one)
    (folder / FILE).write_text(json.dumps(content))


def _read(folder: Path, out: Path) -> tuple[int, int]:
    tokenizer = Tokenizer(folder / FILE, dense_config(vocab_size=258))
    ids = tokenizer.prompt(TEXT)
    return len(ids), len(tokenizer.decode(np.arange(256).tolist() * 10))


def _wrong(original: Any, folder: Path, read: tuple[int, int]) -> str | None:
    return f"{read} of a text of {len(TEXT)}" if max(read) > 70 * len(TEXT) else None


ATTACKS = (
    Attack(
        name="tokenizers that multiply",
        original=_original,
        make=_make,
        read=_read,
        wrong=_wrong,
        quick=20,
        share=100,
        max_seconds=1.0,
        max_bytes=300_000_000,
    ),
)
