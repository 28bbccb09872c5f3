"""tokenizer.json files whose parts make far more of a text than it is."""

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
TEXT = "The cat sat on the mat. " * 40
_LENGTHS = (0, 1, 2, 9, 63, 64, 65, 4000)


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


def _make(rng: random.Random, original: dict[str, Any], folder: Path) -> None:
    content = dict(original)
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
    return f"{read} of a text of {len(TEXT)}" if max(read) > 300_000 else None


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
