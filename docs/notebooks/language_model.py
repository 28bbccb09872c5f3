"""The language model of the notebooks: the one that MODEL names, or a small one, trained here in some seconds.

Its texts are four kinds that this repository has: experts may part them.
"""

import functools
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tokenizers
from flax import nnx

import moe_jax
from moe_jax.configs import AttentionConfig, FFNConfig, LayerConfig, ModelConfig

MODEL = os.environ.get("MODEL")
ROOT = Path(__file__).resolve().parents[2]
LENGTH, ROWS = 64, 16
# A model that has seen much is changed little: fewer steps, and small ones.
STEPS, RATE = (10, 5e-5) if MODEL else (200, 5e-3)
_VOCABULARY, _WIDTH, _LAYERS = 512, 64, 2
_MOST = 200_000


@functools.cache
def texts() -> dict[str, tuple[str, str]]:
    """Returns by kind a text to train on and one that is held out: the last tenth."""
    guides = [ROOT / "README.md", ROOT / "docs/methods.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
    results = _joined(sorted((ROOT / "benchmarks/results").glob("*.md"))).splitlines()
    found = {
        "prose": _joined(guides),
        "code": _joined(sorted((ROOT / "moe_jax").rglob("*.py"))),
        "tables": "\n".join(line for line in results if line.startswith("|")),
        "messages": (ROOT / "tests/project/messages.txt").read_text(encoding="utf-8"),
    }
    return {kind: (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]) for kind, text in found.items()}


def load_language_model() -> moe_jax.Model:
    """Returns the dense model that MODEL names; without it, a small one that is trained on the texts."""
    if MODEL:
        here = ROOT / MODEL  # notebooks run in their own folder
        return moe_jax.load(here if here.exists() else MODEL, dtype="float32")
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=_WIDTH // 4)
    layers = (LayerConfig(attention=attention, mlp=FFNConfig(dim=3 * _WIDTH)),) * _LAYERS
    config = ModelConfig(family="llama", vocab_size=_VOCABULARY, d_model=_WIDTH, max_positions=1024, layers=layers)
    model = moe_jax.Model(moe_jax.Decoder(config, rngs=nnx.Rngs(0)), tokenizer_files=[_tokenizer()])
    return train(model, rate=2 * RATE)[0]


def train(model: moe_jax.Model, *, rate: float = RATE, seed: int = 0) -> tuple[moe_jax.Model, list[Any]]:
    """Returns the model after STEPS steps on the texts, and the record of every step."""
    records: list[Any] = []
    recipe = {"train": {"steps": STEPS}, "optimizer": {"learning_rate": rate}}
    return moe_jax.train(recipe, model, _batches(model, seed), on_step=records.append), records


def held_out(model: moe_jax.Model, kind: str) -> np.ndarray:
    """Returns token ids [ROWS, LENGTH] of the held-out text of a kind."""
    return np.asarray(model.tokenizer.encode(texts()[kind][1])[: ROWS * LENGTH]).reshape(ROWS, LENGTH)


def losses(model: moe_jax.Model) -> dict[str, float]:
    """Returns by kind the loss on the held-out text, nats per token."""
    return {kind: float(_loss(model.decoder, held_out(model, kind))) for kind in texts()}


@nnx.jit
def _loss(decoder: moe_jax.Decoder, ids: jax.Array) -> jax.Array:
    logits = decoder(ids[:, :-1]).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def _batches(model: moe_jax.Model, seed: int) -> Iterator[np.ndarray]:
    """Yields batches of token ids [ROWS, LENGTH + 1] without end, as many rows of each kind."""
    rng = np.random.default_rng(seed)
    ids = [np.asarray(model.tokenizer.encode(text)) for text, _ in texts().values()]
    while True:
        rows = itertools.islice(itertools.cycle(ids), ROWS)
        begins = [(row, rng.integers(0, len(row) - LENGTH - 1)) for row in rows]
        yield np.stack([row[begin : begin + LENGTH + 1] for row, begin in begins])


def _joined(files: list[Path]) -> str:
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)[:_MOST]


def _tokenizer() -> Path:
    """Returns the file of a tokenizer that was made for the texts."""
    bytes_of = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = bytes_of(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=bytes_of.alphabet(), show_progress=False
    )
    made.train_from_iterator((text for text, _ in texts().values()), trainer)
    file = Path(tempfile.mkdtemp()) / "tokenizer.json"
    made.save(str(file))
    return file
