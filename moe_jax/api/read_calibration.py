"""The rows that a model is calibrated on: of files, of the model itself, of texts that come with the library."""

import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moe_jax.api.generate import eos_ids
from moe_jax.api.measure import read_ids, tokenizer_of, why_not_finite
from moe_jax.api.model import Loading, Model, ModelOrPath
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.recording import DEFAULT_SAMPLES, sample_windows
from moe_jax.core.errors import InputError, shown
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.data.calibration_texts.built_in_rows import built_in_examples, questions
from moe_jax.data.calibration_texts.weighted_sources import (
    BUILT_IN,
    SELF,
    CalibrationSources,
    WeightedSource,
    shares,
    weighted_sources,
)
from moe_jax.data.chat_template import find_chat_template, load_chat_template
from moe_jax.data.sections import DataSection
from moe_jax.data.tokenizer import Pair, Tokenizer
from moe_jax.evaluation.drawn_rows import draw_rows
from moe_jax.evaluation.held_out import rows_of, with_lengths
from moe_jax.files.storage_path import as_path
from moe_jax.generation.own_samples import sample_texts
from moe_jax.generation.texts import NonFiniteLogits
from moe_jax.model_io.model_source import ModelSource

Place = Callable[[str], Path]
"""Returns the folder of a recording, or of samples, with a given name."""


def calibration_folder(model: ModelOrPath) -> Path | None:
    """Returns the folder for recordings of a model: beside it if that can be written; None: they are not kept."""
    on_disk = None if isinstance(model, Model) else as_path(model).on_disk
    if on_disk is None or not on_disk.is_dir():
        return None
    place = Path(os.path.abspath(on_disk))  # `.` and `..` have no name of their own
    return place.with_name(f"{place.name}.calibration") if os.access(place.parent, os.W_OK) else None


def read_rows(
    source: ModelSource,
    given: CalibrationSources,
    *,
    seq_len: int,
    samples: int | None,
    most: int = DEFAULT_SAMPLES,
    seed: int,
    image_folder: str | os.PathLike[str] | None = None,
    place: Place | None = None,
    progress: Progress = no_progress,
) -> CalibrationRows:
    """Draws rows of the sources of a calibration: windows of a text, rows of a file, samples of the model.

    Args:
      source: the model.
      given: the sources, see `weighted_sources`.
      seq_len: most tokens of a row.
      samples: number of rows of all sources together, of which each gives its share; None: `most`, or what they have.
      most: number of rows without `samples`; of samples of the model 128 at most, for they take long.
      seed: of what is drawn of every source.
      image_folder: the folder that names of pictures are inside of; None: that of their file.
      place: returns a folder in which the model's own samples are kept, and found again; None: they are not kept.
      progress: called while the model is sampled.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if a source cannot be read, has fewer rows than are asked of it, or nothing in it is scored; the model
        has no tokenizer; or `samples` or a weight is not above 0.
    """
    if samples is not None and samples < 1:
        raise InputError(f"{samples=} must be at least 1")
    sources = weighted_sources(given)
    with_rows = any(one.file is not None and one.file.form != "text" for one in sources)
    if image_folder is not None and not with_rows:
        names = ", ".join(shown(one.name) for one in sources)
        raise InputError(f"image_folder is for files of rows, and {names} is a text")
    model, parts = Model.of_source(source), {}
    data = DataSection(image_folder=None if image_folder is None else os.fspath(image_folder))
    data = with_lengths(data, seq_len=seq_len)
    for one, count in zip(sources, shares(most if samples is None else samples, sources), strict=True):
        how = {"most": count, "at_least": 1 if samples is None else count, "seed": seed}
        if one.name == SELF and one.file is None:
            count = min(count, DEFAULT_SAMPLES) if samples is None else count
            rows = _of_itself(model, seq_len=seq_len, count=count, seed=seed, place=place, progress=progress)
        elif one.file is None:
            rows = _built_in(model, data, **how)
        elif one.file.form == "text":
            rows = _windows(model, one, seq_len=seq_len, **how)
        else:
            tokenizer = tokenizer_of(model, f"a file of {one.file.form}", "give a model that has one")
            found = draw_rows(one.file, data, source.config, tokenizer.path, **how)
            rows = CalibrationRows.of_documents(found)
        if not rows.weights.any():
            raise InputError(f"{one.name}: nothing in it is scored; give conversations with answers")
        parts[one.name] = rows
    return CalibrationRows.joined(parts)


def _windows(
    model: Model, one: WeightedSource, *, seq_len: int, most: int, at_least: int, seed: int
) -> CalibrationRows:
    """Draws windows of a text."""
    assert one.file is not None
    ids = read_ids(model, one.file.path)
    windows = sample_windows(ids, seq_len=seq_len, samples=None if at_least < most else at_least, most=most, seed=seed)
    return CalibrationRows.of_windows(windows)


def _built_in(model: Model, data: DataSection, *, most: int, at_least: int, seed: int) -> CalibrationRows:
    """Draws rows of the texts that come with the library, as many of each kind."""
    file = tokenizer_of(model, f"the source {BUILT_IN}", "calibrate a model that has one").path
    tokenizer = Tokenizer(file, model.config)
    examples = built_in_examples(find_chat_template(file), seed=seed)
    lengths = {"input_len": data.seq_len, "seq_len": data.seq_len}
    by_text = (rows_of(example, tokenizer, None, **lengths) for example in examples)
    # The first window of every text before the second of any.
    every = itertools.chain.from_iterable(itertools.zip_longest(*by_text))
    found = list(itertools.islice((row for row in every if row is not None), most))
    if len(found) < at_least:
        raise InputError(
            f"{BUILT_IN} holds {len(found)} rows of text, and {at_least} are asked for; ask for at most so many, or "
            f"add another source, such as {SELF}"
        )
    return CalibrationRows.of_documents(found)


def _of_itself(
    model: Model, *, seq_len: int, count: int, seed: int, place: Place | None, progress: Progress
) -> CalibrationRows:
    """Samples the model: answers to short questions if it has a chat template, else texts from their beginning."""
    tokenizer = tokenizer_of(model, f"the source {SELF}", "calibrate on a text of token ids that you have sampled")
    model.config.check_scores_tokens(f"the source {SELF}")
    chat = find_chat_template(tokenizer.path) is not None
    prompts = _questions(tokenizer, seq_len, count, seed) if chat else [[_beginning(model, tokenizer)]] * count
    ends = eos_ids(model, chat=chat)
    keep = None
    if place is not None:
        told = (model.source.fingerprint(), prompts, ends, seq_len, seed)
        keep = place(f"self-{hashlib.sha256(repr(told).encode()).hexdigest()[:16]}")
    loaded = Model.of_source(model.source, Loading.for_generation(model.source))
    try:
        texts = sample_texts(
            lambda: loaded.decoder, prompts, length=seq_len, seed=seed, end_ids=ends, keep=keep, progress=progress
        )
    except NonFiniteLogits as error:
        raise InputError(f"{SELF}: {error}: {why_not_finite(loaded)}") from None
    documents = []
    for prompt, text in zip(prompts, texts, strict=True):
        scored = np.arange(1, len(text)) >= len(prompt)
        documents.append(Pair(text[:-1], text[1:], scored.astype(np.float32)))
    return CalibrationRows.of_documents(documents)


def _questions(tokenizer: Tokenizer, seq_len: int, count: int, seed: int) -> list[list[int]]:
    """Returns prompts that ask the model's assistant something, in an order of the seed, again from the first if there
    are too few."""
    template = load_chat_template(tokenizer.path)
    asked = [[{"role": "user", "content": question}] for question in questions()]
    every = [tokenizer.encode(template(one, add_generation_prompt=True)).tolist() for one in asked]
    fitting = [prompt for prompt in every if len(prompt) < seq_len]
    if not fitting:
        raise InputError(f"{SELF}: {seq_len=} leaves no room for an answer; even a short question takes more tokens")
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(fitting))
    return [fitting[order[i % len(order)]] for i in range(count)]


def _beginning(model: Model, tokenizer: Tokenizer) -> int:
    """Returns the token that texts begin with: BOS, or in its absence the EOS that stands between documents."""
    for token in (tokenizer.bos, model.config.bos_id, *model.config.eos_ids):
        if token is not None:
            return token
    raise InputError(f"{SELF}: the model names neither a BOS nor an EOS token, with which a text could begin")
