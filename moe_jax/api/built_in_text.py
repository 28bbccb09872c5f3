"""The text on which a model with NF4 kernels is compared with its source: the user's, or a built-in one."""

import os

import numpy as np

from moe_jax.checks.step0 import ProbeText, has_nf4_kernels
from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer, find_tokenizer
from moe_jax.evaluation.held_out import read_text
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig

NAME = "a built-in text"

TEXT = """\
The harbour lies below the old town, and in the early morning it is the only place with a light. Two boats come in
before six. The men carry the boxes up to the hall, where the buyers stand around with coffee in paper cups and say
little. By eight o'clock everything has been sold, and the gulls take what is left on the stones.

Water boils at a lower temperature on a mountain than at the sea, because the air above it weighs less. Cooks who move
from the coast to a high valley notice that beans need an hour more, although the pot looks as lively as it did before.
A lid that closes tightly helps: it keeps the steam inside, the pressure rises, and with it the temperature.

"Have you read the letter?" she asked. He shook his head and went on peeling the apple, slowly, in one long strip. "I
know what it says," he answered. "They want the house back by the first of May, and they are right to ask for it."

In 1869 a railway joined the two coasts of the continent, and a journey of six months became one of about a week.
To add two fractions, write both over the same denominator first: one half and one third are three sixths and two
sixths, which makes five sixths.
"""


def probe_text(
    source: ModelSource, config: ModelConfig, file: str | os.PathLike[str] | None, *, check: bool
) -> ProbeText | None:
    """Returns the text to compare a model and its source on; None if there is nothing to compare, or no way to.

    Args:
      source: the model that a new one is made from.
      config: config of the new model.
      file: the user's text; None: the built-in one.
      check: whether the models will be compared.

    Raises:
      FileNotFoundError: if there is nothing at `file`.
      InputError: if it is too short or not UTF-8, the source has no tokenizer or does not predict texts, or there are
        no NF4 kernels.
    """
    if file is None:
        if not check or not has_nf4_kernels(config) or not _predicts_texts(source.config):
            return None
        try:
            ids = _tokenizer(source).encode(TEXT)
        except (InputError, FileNotFoundError):  # the logits are compared all the same
            return None
        return ProbeText(NAME, ids) if len(ids) > 1 else None
    if not check:
        raise InputError("a text is for the step-0 check, which was not asked for")
    if not has_nf4_kernels(config):
        raise InputError("a text shows what NF4 kernels change, and the new model has none")
    if not _predicts_texts(source.config):
        raise InputError(f"{source.path} does not continue texts, so that none can show what NF4 kernels change")
    return ProbeText(os.fspath(file), np.asarray(read_text(as_path(file), _tokenizer(source))))


def _predicts_texts(config: ModelConfig) -> bool:
    return not config.has_encoder and config.num_classes is None


def _tokenizer(source: ModelSource) -> Tokenizer:
    return Tokenizer(find_tokenizer(source.tokenizer_files, source.path), source.config)
