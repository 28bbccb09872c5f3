"""Classification of texts: by a head that scores classes, or by how likely the model is to answer with the label.

The second way is how models that were trained on tasks as texts (T5, Switch) solve the tasks of GLUE.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.core.bad_documents import STOP, BadDocument, Skipped
from moe_jax.core.errors import InputError, clipped, shown
from moe_jax.data.data_files import read_through
from moe_jax.data.rows import Example
from moe_jax.data.tokenizer import Pair, Tokenizer
from moe_jax.evaluation.held_out import RowScore, target_losses
from moe_jax.files.json_toml import ANYTHING, is_unicode, parse_json
from moe_jax.files.storage_path import as_path, raise_no_file
from moe_jax.models import ModelConfig
from moe_jax.nn.inputs import Batch, model_inputs

# Names that data sets have for the texts to be labelled; the first entry of which a line has all names counts.
TEXT_KEYS = (
    ("text",), ("sentence",), ("input",), ("prompt",), ("sentence1", "sentence2"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("question", "passage"),
)  # fmt: skip
_Z = 1.959964  # of the normal distribution: 95% lie within
_FIELD = re.compile(r"\{(\w+)\}")


class Labelled(NamedTuple):
    """A text and its true label: the name of a class, or its number; and where it is, for messages."""

    text: str
    label: str | int
    where: str = ""


class Classification(NamedTuple):
    """Compares the labels that a model gives texts with the true ones.

        >>> moe_jax.Classification(0.5, (0.09, 0.91), 1, 2, ("bad", "good"), ((1, 0), (1, 0)), (0, 0), "head").correct
        1

    Attributes:
      accuracy: share of the texts with the right label.
      interval: 95% confidence interval of the share, after Wilson.
      correct, count: number of texts with the right label, and of all texts.
      labels: names of the classes.
      confusion: number of texts by true label, and by label given.
      predictions: the index of the label given to every text.
      by: `head`, or `likelihood`.
      cut: number of texts that were too long, and were cut.
      skipped: number of bad texts that were left out, of all the figures above.
      problems: where the first of these are, and what is wrong with them.
    """

    accuracy: float
    interval: tuple[float, float]
    correct: int
    count: int
    labels: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    predictions: tuple[int, ...]
    by: str
    cut: int = 0
    skipped: int = 0
    problems: tuple[str, ...] = ()


def read_labelled(path: str | Path, template: str | None = None, skipped: Skipped = STOP) -> list[Labelled]:
    """Reads the texts of a file of JSON lines, in the style of GLUE; blank lines are skipped.

    Lines have a `label`, a string or a number from 0 on, and a text: `text`, `sentence`, or `input`, or two:
    `sentence1` and `sentence2`, or others of `TEXT_KEYS`, which are joined by a blank. A template makes the text
    instead, with keys of the lines in braces: `"sst2 sentence: {sentence}"`. `skipped` decides about bad lines, and
    counts them; by default the first ends it.

    Raises:
      FileNotFoundError: no such file.
      BadDocument: for a line of another form, with its number, unless it is skipped.
      InputError: for a file without lines, and a template without a key.
    """
    path = as_path(path)
    if not path.is_file():
        raise_no_file("labelled texts", path)
    if template is not None and not _FIELD.search(template):
        raise InputError(f"the template {shown(template)} names no key of the lines, as in 'sentence: {{sentence}}'")
    found = []
    with read_through(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                where = f"{path}, line {number}"
                with skipped.passed_over():
                    try:
                        found.append(_labelled(line, template)._replace(where=where))
                    except InputError as error:
                        raise BadDocument(f"{where}: {error}") from None
    skipped.check_any_left(len(found), str(path))
    if not found:
        raise InputError(f"{path} holds no labelled texts")
    return found


def _labelled(line: bytes, template: str | None) -> Labelled:
    value = parse_json(line, where="a line that", allow=ANYTHING, max_values=len(line))
    if not isinstance(value, dict):
        raise InputError(f"expected an object with a label, got a JSON {type(value).__name__}")
    label = value.get("label")
    if isinstance(label, bool) or not isinstance(label, str | int) or (isinstance(label, int) and label < 0):
        raise InputError(f"'label' is {shown(label)}, expected a string or a number from 0 on")
    if template is not None:
        keys = tuple(_FIELD.findall(template))
    else:
        keys = next((keys for keys in TEXT_KEYS if set(keys) <= value.keys()), None)
        if keys is None:
            known = ", ".join(" and ".join(keys) for keys in TEXT_KEYS)
            raise InputError(
                f"an object with the keys {clipped(', '.join(map(shown, value)))}, and none of {known}; "
                "say with a template where the text is"
            )
    for key in keys:
        if not isinstance(value.get(key), str) or not is_unicode(value[key]):
            raise InputError(f"{key!r} is {shown(value.get(key))}, expected a text")
    if template is None:
        return Labelled(" ".join(value[key] for key in keys), label)
    return Labelled(_FIELD.sub(lambda match: value[match[1]], template), label)


def names_of_labels(
    examples: Iterable[Labelled], labels: Sequence[str] | None, known: Sequence[str] | None, count: int | None
) -> tuple[str, ...]:
    """Returns the names of all labels, in the order of their numbers.

    `labels` are names given by the user, `known` those that the model has for its classes, of which its head has
    `count`; None: it scores tokens.

    Raises:
      InputError: if there are too few, or more than classes, or names are needed and none are known. A label that is
        none of them is not looked for here; see `check_label`.
    """
    used = {example.label for example in examples}
    numbers, texts = {one for one in used if isinstance(one, int)}, {one for one in used if isinstance(one, str)}
    if labels is None and count is not None:
        # Labels that are strings are looked for among the model's own names.
        labels = known if known is not None else list(map(str, range(count)))
    if labels is None and numbers:
        raise InputError('the labels are numbers: say with --labels "negative,positive" what 0, 1, ... mean')
    names = tuple(sorted(texts) if labels is None else labels)
    if count is not None and len(names) != count:
        raise InputError(f"{len(names)} names of labels for a head that scores {count} classes")
    if len(set(names)) != len(names) or (len(names) < 2 and count is None) or not all(names):
        raise InputError(f"labels {shown(list(names))}: expected two or more that differ, and none that is empty")
    return names


def check_label(example: Labelled, names: Sequence[str]) -> None:
    """Raises `BadDocument` for a label that is none of the names, nor the number of one."""
    is_known = example.label < len(names) if isinstance(example.label, int) else example.label in names
    if not is_known:
        raise BadDocument(f"label {shown(example.label)} is none of the labels {shown(list(names))}")


def _class_scores(graphdef: nnx.GraphDef, states: tuple[nnx.State, ...], batch: Batch) -> Float[Array, "B C"]:
    # Rows without a text are padding, whose scores are ignored.
    last = jnp.maximum(jnp.sum(batch["segment_ids"], axis=1) - 1, 0)
    return nnx.merge(graphdef, *states)(**model_inputs(batch), last_only=last).logits[:, 0]


ScoreRows = Callable[[RowScore, Sequence[Pair]], np.ndarray]
"""`score_rows` with a model, the size of batches, and a mesh."""


def class_scores(score_rows: ScoreRows, config: ModelConfig, texts: Iterable[np.ndarray]) -> Float[np.ndarray, "n C"]:
    """Returns logits of the classes at the last token of every text, given its ids, at least one.

    With an encoder, the encoder and the decoder both get the text.
    """
    return score_rows(_class_scores, [_text_row(np.asarray(ids, np.int32), config.decoder_start_id) for ids in texts])


def _text_row(ids: np.ndarray, start: int | None) -> Pair:
    nothing = np.zeros(len(ids), np.float32)
    if start is None:
        return Pair(ids, ids, nothing)
    return Pair(np.append(np.int32(start), ids[:-1]), ids, nothing, ids)


def text_ids(config: ModelConfig, tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Returns the ids, Int32[n], of a text for a head; raises `BadDocument` if there are none."""
    ids = tokenizer.inputs(text) if config.has_encoder else tokenizer.prompt(text)
    if not len(ids):
        raise BadDocument("a text to be labelled has no tokens")
    return ids


def scores_by_head(
    score_rows: ScoreRows, config: ModelConfig, ids: Sequence[np.ndarray], *, input_len: int
) -> tuple[Float[np.ndarray, "n C"], int]:
    """Returns the head's logits for every text, given its `text_ids`, and how many were cut to `input_len` tokens."""
    # An encoder's input keeps the token that ends it.
    ends = int(config.has_encoder)
    cut = [np.concatenate([one[: input_len - ends], one[len(one) - ends :]]) if len(one) > input_len else one
           for one in ids]  # fmt: skip
    return class_scores(score_rows, config, cut), sum(len(one) > input_len for one in ids)


def label_pairs(
    config: ModelConfig, tokenizer: Tokenizer, text: str, labels: Sequence[str], *, input_len: int
) -> list[Pair]:
    """Returns a text, cut to `input_len` tokens, with every label.

    Without an encoder, a blank stands between text and label unless the text ends with white space, and `input_len`
    counts both: where they are longer with the longest label, the beginning of the text is left out, the same for all
    labels.

    Raises:
      BadDocument: if no token stands before the labels, so that their first is not predicted.
      InputError: if a label leaves no token of the text.
    """

    def pair(before: str, label: str, **lengths: int) -> Pair:
        return tokenizer.pair(Example(before + label, len(before), is_response=True), **lengths)

    if config.has_encoder:
        return [pair(text, label, input_len=input_len) for label in labels]
    before = text if not text or text[-1].isspace() else f"{text} "
    if not len(tokenizer.prompt(before)):
        raise BadDocument("a text to be labelled has no tokens")
    pairs = [pair(before, label) for label in labels]
    longest, label = max(zip(pairs, labels, strict=True), key=lambda one: len(one[0].tokens))
    left_out = len(longest.tokens) - input_len
    if left_out <= 0:
        return pairs
    if any(one.weights[:left_out].any() for one in pairs):
        raise InputError(
            f"label {shown(label)} has {int(longest.weights.sum()):,} tokens, and leaves nothing of a text in "
            f"input_len = {input_len:,}; give a larger one"
        )
    return [
        Pair(one.tokens[left_out:], one.targets[left_out:], one.weights[left_out:], target_was_cut=True)
        for one in pairs
    ]


def scores_by_likelihood(
    score_rows: ScoreRows, pairs: Sequence[Sequence[Pair]]
) -> tuple[Float[np.ndarray, "n C"], int]:
    """Returns the log-likelihood of every label after every text, given its `label_pairs`, and how many were cut."""
    losses = score_rows(target_losses, [pair for of_text in pairs for pair in of_text])
    cut = sum(any(pair.input_was_cut or pair.target_was_cut for pair in of_text) for of_text in pairs)
    return -losses.reshape(len(pairs), -1), cut


def count_labels(
    examples: Sequence[Labelled], scores: Float[np.ndarray, "n C"], labels: Sequence[str], by: str, cut: int
) -> Classification:
    """Computes accuracy and confusion of the labels with the highest scores; the first of equal ones.

    Raises `InputError` for scores that are not finite.
    """
    if not np.isfinite(scores).all():
        row = int(np.argmin(np.isfinite(scores).all(axis=1)))
        raise InputError(f"the scores of {examples[row].where} are not finite: {scores[row].tolist()}")
    number: Mapping[Any, int] = {name: index for index, name in enumerate(labels)}
    wanted = [one.label if isinstance(one.label, int) else number[one.label] for one in examples]
    given = scores.argmax(axis=1)
    confusion = np.zeros((len(labels), len(labels)), int)
    np.add.at(confusion, (wanted, given), 1)
    correct, count = int(np.trace(confusion)), len(examples)
    matrix, predictions = tuple(map(tuple, confusion.tolist())), tuple(given.tolist())
    interval = wilson_interval(correct, count)
    return Classification(correct / count, interval, correct, count, tuple(labels), matrix, predictions, by, cut)


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """Returns the 95% confidence interval of a share (Wilson, 1927)."""
    share, z2 = correct / count, _Z**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)
