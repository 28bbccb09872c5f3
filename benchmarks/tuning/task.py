"""What all runs have in common: the dense model, the texts, and the batches of a seed."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_jax.open_source import open_source
from moe_jax.train.data import open_data
from moe_jax.train.data_sections import DataSection, SourceSection
from moe_jax.train.tokenizer import Tokenizer, find_tokenizer
from tuning.models import Leaves
from tuning.settings import Settings
from tuning.texts import DOMAINS, Text, base_texts, shakespeare


class Scored(NamedTuple):
    """Int32[n] ids of the texts that are scored."""

    held_out: np.ndarray
    validation: np.ndarray


class Task:
    """Attributes:
    settings: equal for every run.
    seeds: of the runs.
    work: folder of what is kept between runs.
    dense: stories260K.
    """

    def __init__(self, data: Path, work: Path, settings: Settings, seeds: Sequence[int]):
        """Reads the dense model and prepares the texts.

        Args:
          data: the folder that `peft_quality.py` describes.
          work: made, if it is not there.
          settings: equal for every run.
          seeds: of the runs.
        """
        source = open_source(data / "weights" / "stories260K" / "hf")
        self.settings = settings
        self.seeds = tuple(seeds)
        self.work = work
        self.dense = Leaves(source.config, {path: source.read(path) for path in source.specs()})
        self._tokenizer = find_tokenizer(source.tokenizer_files, source.path)
        work.mkdir(parents=True, exist_ok=True)
        makers: dict[str, Callable[[Path, Path], Text]] = {"shakespeare": shakespeare, **DOMAINS}
        self._text = cache(lambda name: makers[name](data, work))
        self._base_texts = cache(lambda: base_texts(data, work))
        self.scored = cache(self._scored)
        self.batches = cache(self._batches)

    def _scored(self, name: str) -> Scored:
        """Of `shakespeare`, or of a domain."""
        text, tokenizer = self._text(name), Tokenizer(self._tokenizer, self.dense.config)
        held_out, validation = tokenizer.encode(text.held_out), tokenizer.encode(text.validation)
        return Scored(held_out[: self.settings.held_out_tokens], validation[: self.settings.validation_tokens])

    def _batches(self, name: str, seed: int) -> list[dict[str, np.ndarray]]:
        """Of `shakespeare`, of a domain, or of `base`; the same for every model of a seed."""
        settings = self.settings
        steps, size = max(settings.upcycled_steps, settings.tuned_steps), settings.batch_size
        if name == "base":
            files, steps, size = self._base_texts(), settings.base_steps, settings.base_batch_size
        else:
            files = (self._text(name).train,)
        # Short pieces in random order: with long ones a run ends on a few documents, and how near these are to the
        # held-out ones decides its loss (see `ders.training`).
        section = DataSection(
            sources=tuple(SourceSection(path=str(file), weight=1.0) for file in files),
            seq_len=settings.seq_len,
            piece_kib=1,
            prefetch=0,
        )
        data = open_data(section, self.dense.config, self._tokenizer, seed=seed, batch_size=size, rows=range(size))
        return [next(data) for _ in range(steps)]
