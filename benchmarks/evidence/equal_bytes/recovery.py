"""Recovery: routers and norms of a compressed model learn the logits of the model before it, by the recipe for it."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from evidence.equal_bytes.models import Subject
from evidence.studies.compression_job import scored_texts
from evidence.studies.corpus import Corpus, tokenizer_file
from evidence.studies.jobs import Place
from evidence.studies.scales import SCALES
from evidence.studies.texts import DOMAINS
from evidence.studies.trainer import Trainer
from evidence.studies.training_job import DENSE, SELECTION, start_config
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder
from moe_jax.training.in_memory_training import train_on_batches
from moe_jax.training.recipe import load_recipe

RECIPE = Path(__file__).resolve().parents[3] / "train" / "recipes" / "recover_router.toml"
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
MIXTURE = "domains"


class Recovered(NamedTuple):
    """Attributes:
    model: with the rate that was chosen.
    rate: the highest learning rate.
    tried: the selection text's loss of every rate, nats per token, mean of the domains.
    """

    model: Decoder
    rate: float
    tried: dict[str, float]


def recovered(place: Place, subject: Subject, small: ModelSource, teacher: ModelSource, *, seed: int) -> Recovered:
    """Trains a compressed model with every rate, and keeps the one that is best on the selection text.

    Args:
      place: of the data.
      subject: the model before it was compressed.
      small: the compressed model.
      teacher: the model before.
      seed: of the batches.
    """
    found, tried = {}, {}
    for rate in RATES:
        overrides = [
            f"optimizer.learning_rate={rate}",
            f"train.batch_size={SCALES[subject.scale].batch_size}",
            f"data.seq_len={SCALES[subject.scale].seq_len}",
        ]
        recipe = load_recipe(RECIPE, overrides)
        batches = _batches(place, subject.scale, seed, recipe.train.steps)
        model, _ = train_on_batches(recipe, small, batches, devices=jax.devices()[:1], teacher=teacher)
        found[rate], tried[f"{rate:g}"] = model, _selection_loss(place, subject.scale, model)
    best = min(RATES, key=lambda rate: tried[f"{rate:g}"])
    return Recovered(found[best], best, tried)


@lru_cache(maxsize=2)
def _batches(place: Place, scale: str, seed: int, steps: int) -> list[dict[str, np.ndarray]]:
    config = start_config(place, scale, DENSE)
    return Corpus(place, SCALES[scale], config, tokenizer_file(place, SCALES[scale])).batches(MIXTURE, seed, steps)


def _selection_loss(place: Place, scale: str, model: Decoder) -> float:
    trainer, texts = _trainer(model.config), scored_texts(place, scale, SELECTION)
    return float(np.mean([trainer.score(model, texts[name], SCALES[scale].seq_len) for name in DOMAINS]))


@lru_cache(maxsize=2)
def _trainer(config: ModelConfig) -> Trainer:
    """For its score alone."""
    return Trainer(config, steps=1, warmup_steps=0)
