"""Labelling texts with a model."""

import os
from collections.abc import Sequence

from flax import nnx

from moe_jax.api.model import ModelOrPath
from moe_jax.api.run import default_seq_len, open_lazily, tokenizer_of
from moe_jax.conversion.hf_config import class_names
from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.evaluation.classification import (
    Classification,
    Labelled,
    count_labels,
    names_of_labels,
    read_labelled,
    scores_by_head,
    scores_by_likelihood,
)
from moe_jax.files.storage_path import as_path

Examples = str | os.PathLike[str] | Sequence[tuple[str, str | int]]


def classify(
    model: ModelOrPath,
    examples: Examples,
    *,
    labels: Sequence[str] | None = None,
    template: str | None = None,
    input_len: int | None = None,
    batch_size: int = 8,
) -> Classification:
    """Measures how often a model gives texts the labels that they should have.

    A model with a head for classes scores them at the last token of the text. Any other is asked how likely it is to
    say each label after the text (or, with an encoder, in answer to it), and the likeliest is taken: how T5 does GLUE.

        >>> moe_jax.classify(moe_jax.tiny_model(), [("a fine day", "good"), ("rain", "bad")])
        Traceback (most recent call last):
        moe_jax.core.errors.InputError: ...tokenizer.json, which classifying texts needs...

    Args:
      model: a model, or the path of one.
      examples: the path of a file of JSON lines with `label` and `text`, `sentence`, `sentence1` and `sentence2`, or
        the like, as GLUE has them; or a list of pairs of a text and its label, a string or a number.
      labels: names of the labels, in the order of their numbers. By default those of the model's classes, or the
        strings that occur as labels.
      template: for a file: the text for the model, with keys of the lines in braces: `"sst2 sentence: {sentence}"`.
      input_len: number of tokens that are read; by default 1024, or the context length if that is less. The end of a
        longer text is left out, or its beginning if a decoder is asked for likelihoods.
      batch_size: rows computed at once. Does not change the result.

    Returns:
      `accuracy`, its 95% `interval` (Wilson), `correct`, `count`, `labels`, `confusion` (label by label given),
      `predictions`, `by` (`head` or `likelihood`), and how many texts were `cut`.

    Raises:
      FileNotFoundError: if there is nothing at a path.
      InputError: for lines that are no labelled texts, or labels that do not go with each other or with the head.
    """
    if batch_size < 1:
        raise InputError(f"{batch_size=} must be at least 1")
    model = open_lazily(model)
    config = model.config
    input_len = default_seq_len(config) if input_len is None else input_len
    if input_len < 2:
        raise InputError(f"{input_len=} must be at least 2")
    found = _read(examples, template)
    names = names_of_labels(found, labels, class_names(config), config.num_classes)
    # A decoder that only continues texts need not have learned to end them after a label.
    eos = "auto" if config.has_encoder else "never"
    tokenizer = Tokenizer(tokenizer_of(model, "classifying texts", "put one there").path, config, eos=eos)
    texts, given = [one.text for one in found], {"input_len": input_len, "batch_size": batch_size, "mesh": model.mesh}
    graphdef, state = nnx.split(model.decoder)
    if config.num_classes is not None:
        scores, cut = scores_by_head(graphdef, (state,), config, tokenizer, texts, **given)
        return count_labels(found, scores, names, "head", cut)
    scores, cut = scores_by_likelihood(graphdef, (state,), config, tokenizer, texts, names, **given)
    return count_labels(found, scores, names, "likelihood", cut)


def _read(examples: Examples, template: str | None) -> list[Labelled]:
    if isinstance(examples, str | os.PathLike):
        return read_labelled(as_path(examples), template)
    if template is not None:
        raise InputError("a template goes with a file, whose lines have keys")
    found = [Labelled(text, label) for text, label in examples]
    if not found or not all(isinstance(one.text, str) for one in found):
        raise InputError("examples are pairs of a text and its label, and there must be one at least")
    return found
