"""What all entries of the comparison are made of: a model, the text to calibrate with, and sizes."""

import dataclasses
import json
import math
from functools import cached_property
from pathlib import Path

import numpy as np

import moe_jax
from evidence.commands import refusal
from evidence.studies.corpus import write_whole
from evidence.studies.texts import read_text
from moe_jax.api.open_source import open_source
from moe_jax.compression.calibration.recording import sample_windows

CALIBRATION, BUILT_IN, SELF = "wiki", "built-in", "self"
DRAWS = (0, 1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Attributes:
    windows: of every text that is scored.
    length: tokens of each.
    prompts: that are gone on with greedily, of all texts together.
    samples: windows to calibrate with.
    seq_len: tokens of each.
    """

    windows: int
    length: int
    prompts: int
    samples: int
    seq_len: int


SMALL = Sizes(windows=40, length=256, prompts=200, samples=32, seq_len=512)
LARGE = Sizes(windows=12, length=256, prompts=200, samples=32, seq_len=256)
_LARGE_FROM = 50_000_000


@dataclasses.dataclass(frozen=True)
class Task:
    """One model of the comparison.

    Attributes:
      name: of the model in the results.
      model: a model directory or a Hugging Face directory.
      data: the folder of texts that `claims.py` describes.
      work: a folder for what is kept of this model.
      llmc: the Python that has llm-compressor; None: there is none.
      questions: of PIQA and of ARC-easy, each, that some entries answer.
    """

    name: str
    model: Path
    data: Path
    work: Path
    llmc: Path | None = None
    questions: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """Of the model: what was measured of another one does not stand beside it."""
        return open_source(self.model).fingerprint()

    @cached_property
    def weights(self) -> int:
        """The number of parameters of the model."""
        return sum(math.prod(spec.shape) for spec in open_source(self.model).specs().values())

    @cached_property
    def experts(self) -> int:
        """Of an MoE layer; 0 for a dense model."""
        config = open_source(self.model).config
        return config.moe(config.moe_layers[0]).num_experts if config.moe_layers else 0

    @property
    def sizes(self) -> Sizes:
        return LARGE if self.weights >= _LARGE_FROM else SMALL

    @property
    def text(self) -> Path:
        """The text to calibrate with."""
        file = self.work / f"{CALIBRATION}.txt"
        if not file.exists():
            write_whole(file, read_text(CALIBRATION, self.data).train)
        return file

    def calibrated(self, draw: int, text: str | Path | None = None) -> list[object]:
        """Options of `compress` that calibrate with a draw of windows."""
        given = self.text if text is None else text
        name = given.name if isinstance(given, Path) else given
        folder = self.work / f"calibration-{Path(name).stem}-{draw}"
        sizes = ["--samples", self.sizes.samples, "--seq-len", self.sizes.seq_len]
        return ["--calibrate", given, *sizes, "--calibration-seed", draw, "--calibration-dir", folder]

    def command(self, *words: object) -> None:
        """Runs a command, without what it prints.

        Raises:
          RefusedError: if it refuses, with its reason, in which there are no paths of this machine.
          SystemExit: if it ends otherwise than well, without a reason: a signal ended it.
        """
        if (why := refusal(*words)) is not None:
            for folder in (self.work, self.model, self.data):
                why = why.replace(str(folder), folder.name)
            raise RefusedError(why)

    def calibration_windows(self, draw: int) -> np.ndarray:
        """Int32[samples, seq_len]: the windows that `compress` draws of the text."""
        ids = moe_jax.load(self.model).tokenizer.encode(self.text.read_text("utf-8"))
        return sample_windows(ids, seq_len=self.sizes.seq_len, samples=self.sizes.samples, seed=draw)

    @cached_property
    def checkpoint(self) -> Path:
        """The model as a Hugging Face directory."""
        folder = self.work / "checkpoint"
        if not folder.exists():
            self.command("export", self.model, folder)
        return folder

    @cached_property
    def gguf(self) -> Path:
        """The model as a GGUF file, whole."""
        file = self.work / "whole.gguf"
        if not file.exists():
            self.command("export", self.model, file, "--format", "gguf")
        return file


def group_size(task: Task) -> int:
    """The inputs that share a scale in llm-compressor's codes: 128, or fewer where a matrix has another number of them.

    Raises:
      RefusedError: if no group fits.
    """
    config = json.loads((task.checkpoint / "config.json").read_text())
    inputs = (config["hidden_size"], config["intermediate_size"])
    fit = [size for size in (128, 64, 32) if not any(number % size for number in inputs)]
    if not fit:
        raise RefusedError(f"inputs of {' and '.join(map(str, inputs))} cannot be cut into groups of 32 or more")
    return fit[0]


class RefusedError(Exception):
    """An entry that cannot be made of a model, and why."""
