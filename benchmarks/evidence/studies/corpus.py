"""What a model of some scale reads: its tokenizer, the batches of a seed, and the tokens that are scored."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from evidence.studies.jobs import Place
from evidence.studies.scales import SMOLLM, STORIES, Scale
from evidence.studies.texts import DOMAINS, MIXTURES, read_text
from moe_jax.api.open_source import open_source, read_config
from moe_jax.data.pipeline import open_data
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.tokenizer import Tokenizer, find_tokenizer
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

# Characters of a text to train on that are enough to take stretches from.
_ENCODED = 40_000


class Corpus:
    """Attributes:
    tokenizer_file: of the scale's models.
    """

    def __init__(self, place: Place, scale: Scale, config: ModelConfig, tokenizer_file: Path):
        """Reads nothing yet.

        Args:
          place: of the data, and where texts are written that batches are made from.
          scale: of the models.
          config: of a model that reads the tokens.
          tokenizer_file: of the model.
        """
        self.tokenizer_file = tokenizer_file
        self._place, self._scale, self._config = place, scale, config
        self._tokenizer = Tokenizer(tokenizer_file, config)

    def batches(self, mixture: str, seed: int, steps: int) -> list[dict[str, np.ndarray]]:
        """The batches of a seed, the same for every model of the scale; the texts of a mixture count alike."""
        rows = range(self._scale.batch_size)
        section = DataSection(
            sources=self.sources(mixture),
            seq_len=self._scale.seq_len,
            # Short pieces in random order: with long ones a run ends on a few documents, and how near these are to
            # the text that is scored decides its loss.
            piece_kib=1,
            prefetch=0,
        )
        data = open_data(section, self._config, self.tokenizer_file, seed=seed, batch_size=len(rows), rows=rows)
        return [next(data) for _ in range(steps)]

    def sources(self, mixture: str) -> tuple[SourceSection, ...]:
        """The texts of a mixture as a recipe names them."""
        return tuple(SourceSection(path=str(self._train_file(name)), weight=1.0) for name in MIXTURES[mixture])

    def scored(self, split: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Int32[n] of every text; `split` is `selection` or `test`."""
        ids = {name: self._tokenizer.encode(getattr(read_text(name, self._place.data), split)) for name in names}
        return {name: all_of[: self._scale.scored_tokens] for name, all_of in ids.items()}

    def encode(self, name: str) -> np.ndarray:
        """Int32[n], the beginning of a text that is trained on."""
        return self._tokenizer.encode(read_text(name, self._place.data).train[:_ENCODED])

    def _train_file(self, name: str) -> Path:
        """The text to train on as a file of its own. Two workers may write it: what they write is the same."""
        text = read_text(name, self._place.data).train
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        file = self._place.work / "texts" / f"{name}-{digest}.txt"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
        return file


def write_whole(file: Path, text: str) -> None:
    """Writes a text file that is there whole or not at all."""
    partial = file.with_name(f"{file.name}.{np.random.SeedSequence().entropy}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def given_model(place: Place, scale: Scale) -> ModelSource:
    """The dense model of a scale that brings one.

    Raises:
      FileNotFoundError: if it is not there.
    """
    if scale.name == SMOLLM.name:
        if place.smollm is None:
            raise FileNotFoundError("SmolLM2-135M is not there; name its folder with --smollm")
        return open_source(place.smollm)
    assert scale.name == STORIES.name
    return open_source(place.data / "weights" / "stories260K" / "hf")


def middle_config() -> ModelConfig:
    """The config of the dense model of the scale `middle`."""
    return read_config(RECIPES / "middle.json")


@cache
def tokenizer_file(place: Place, scale: Scale) -> Path:
    """The tokenizer of a scale; one is made of the texts to train on where the scale says of what size."""
    if scale.vocab_size is None:
        source = given_model(place, scale)
        return find_tokenizer(source.tokenizer_files, source.path)
    file = place.work / "tokenizers" / scale.name / "tokenizer.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, byte_pairs(DOMAINS, place.data, scale.vocab_size).to_str())
    return file


def byte_pairs(texts: Iterable[str], data: Path, vocab_size: int) -> tokenizers.Tokenizer:
    """Makes a tokenizer of byte-level byte pairs of some texts of DATA; ids 1 and 2 are those of beginning and end."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Texts count alike: a million characters of each.
    tokenizer.train_from_iterator((read_text(name, data).train[:1_000_000] for name in texts), trainer)
    return tokenizer
