"""The verbs that measure a model: evaluate and classify run it, plan counts what it costs."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
from flax import nnx

from moe_jax.api.model import Model, ModelOrPath, open_model
from moe_jax.api.open_source import read_config
from moe_jax.conversion.hf_config import class_names
from moe_jax.core.bad_documents import STOP, OnBad, Skipped, naming
from moe_jax.core.errors import InputError, check_member
from moe_jax.core.finite import is_floating, largest_magnitude
from moe_jax.data.data_files import uncompressed
from moe_jax.data.rows import Example
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.tokenizer import Pair, Tokenizer
from moe_jax.evaluation import classification, held_out
from moe_jax.files.storage_path import as_path, raise_no_file
from moe_jax.model_io.in_memory import IN_MEMORY
from moe_jax.models import ModelConfig
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.spec import AdaptSpec
from moe_jax.planning.model_costs import (
    ModelPlan,
    make_plan,
    planned_strategies,
    planned_vision,
    training_memory,
    tuned_parameters,
)
from moe_jax.training.recipe import OptimizerSection
from moe_jax.upcycling.dense_to_moe import upcycled_config
from moe_jax.upcycling.spec import UpcycleSpec

if TYPE_CHECKING:
    from moe_jax.api.train import RecipeOrPath
    from moe_jax.planning.proposals import Proposals

# Long enough for context to matter, short enough for any machine; a model with fewer positions gets fewer.
_DEFAULT_SEQ_LEN = 1024

Text = str | os.PathLike[str] | Sequence[int] | np.ndarray
Texts = Sequence[tuple[str, str]]


def evaluate(
    model: ModelOrPath,
    text: Text | Texts,
    *,
    seq_len: int | None = None,
    input_len: int | None = None,
    batch_size: int = 8,
    apply_chat_template: bool = False,
    bad_documents: OnBad = "stop",
) -> held_out.Evaluation:
    """Measures the perplexity of a model on a text, or on the targets of pairs.

    A text is tokenised whole without special tokens and cut into consecutive windows, the last of which may be shorter;
    every token but the first of each window is scored. Pairs are inputs and targets: every token of a target is scored,
    and the EOS that ends it where the model names one, given the input and the target so far. A model with an encoder
    is scored on pairs alone; a model without one reads input and target as one text. If a pair is too long, an encoder
    leaves out its end, and a model without one its beginning. Files may have every form that training data has, but
    *.array_record files of tokens must have been made with the model's own tokenizer.

        >>> scored = moe_jax.evaluate(moe_jax.tiny_model(), range(40), seq_len=16)
        >>> scored.tokens, scored.windows, 60 < scored.perplexity < 68
        (37, 3, True)

    Args:
      model: a model, or the path of one.
      text: the path of a text file; or token ids, as `model.tokenizer.encode` makes them of a string. Documents,
        pairs or conversations: the path of a file `*.jsonl` of lines such as `{"text": "..."}`, `{"prompt": "...",
        "response": "..."}` or `{"messages": [...]}`, or of a table (`*.parquet`, `*.arrow`), or a list of pairs of
        strings.
      seq_len: length of a window or row, of targets where there is an encoder; by default 1024, or what the model can
        do if that is less.
      input_len: length of inputs where there is an encoder; by default the same.
      batch_size: windows or pairs computed at once. Does not change the result.
      apply_chat_template: whether the pairs of a file are a question of the user and the assistant's answer, written
        with the model's chat template, as training data with `chat = true` are.
      bad_documents: whether a document of a file that cannot be scored is an error (`stop`), or is left out and counted
        (`skip`).

    Returns:
      `tokens` scored, `nll` (mean, natural log), `perplexity`, `total_nll`, `windows` or pairs, how many pairs were
      `cut`, and how many bad documents were `skipped`, with the `problems` of the first of these.

    Raises:
      FileNotFoundError: if there is nothing at a path.
      InputError: if the text is not UTF-8 or too short, or no pairs for an encoder; ids are not the model's, it has no
        tokenizer for a text, or the perplexity is not finite.
    """
    lengths = {"seq_len": seq_len, "input_len": input_len}
    how: dict[str, Any] = {"apply_chat_template": apply_chat_template, "bad_documents": bad_documents}
    found = score(model, text, **lengths, batch_size=batch_size, **how)
    if not math.isfinite(found.perplexity):
        why = "the model predicts nothing of this text"
        if not math.isfinite(found.nll):
            why = why_not_finite(open_lazily(model))
        raise InputError(f"the perplexity is not finite (nll {found.nll:.6g}): {why}")
    return found


def score(
    model: ModelOrPath,
    text: Text | Texts,
    *,
    seq_len: int | None,
    batch_size: int,
    input_len: int | None = None,
    apply_chat_template: bool = False,
    bad_documents: OnBad = "stop",
) -> held_out.Evaluation:
    """Measures as `evaluate` does, but also returns figures that are not finite: a model of a sweep may be broken."""
    if batch_size < 1:
        raise InputError(f"{batch_size=} must be at least 1")
    model = open_lazily(model)
    if input_len is not None and not model.config.has_encoder:
        raise InputError(f"{input_len=} is for models with an encoder, which this has not")
    seq_len = default_seq_len(model.config) if seq_len is None else seq_len
    input_len = default_seq_len(model.config) if input_len is None else input_len
    held_out.check_seq_len(seq_len)
    if input_len < 2:
        raise InputError(f"{input_len=} must be at least 2")
    model.config.check_scores_tokens("a perplexity")
    skipped = _skipped(bad_documents)
    lengths = {"input_len": input_len, "seq_len": seq_len}
    pairs = read_pairs_for(model, text, **lengths, chat=apply_chat_template, skipped=skipped)
    rows = read_ids(model, cast(Text, text)) if pairs is None else pairs
    graphdef, state = nnx.split(model.decoder)
    found = held_out.Evaluator(graphdef, rows, seq_len=seq_len, batch_size=batch_size, mesh=model.mesh)(state)
    return found._replace(skipped=skipped.count, problems=tuple(skipped.problems))


def _skipped(bad_documents: str) -> Skipped:
    check_member("choice of bad_documents", bad_documents, get_args(OnBad))
    return Skipped(cast(OnBad, bad_documents))


def read_pairs_for(
    model: Model, text: Any, *, input_len: int, seq_len: int, chat: bool = False, skipped: Skipped = STOP
) -> list[Pair] | None:
    """Returns the pairs of a list or a file, None for a text. Takes the input of `evaluate`, and raises its errors."""
    lengths: dict[str, Any] = {"input_len": input_len, "seq_len": seq_len}
    if isinstance(text, str | os.PathLike):
        source, data = SourceSection(path=os.fspath(text), chat=chat), held_out.with_lengths(DataSection(), **lengths)
        if source.form == "text" and not model.config.has_encoder:
            return None
        what = f"a file of {'pairs' if source.form == 'text' else source.form}"
        tokenizer = tokenizer_of(model, what, "give a model that has one")
        rows = held_out.read_held_out(source, data, model.config, tokenizer.path, skipped)
        assert isinstance(rows, list)
        return rows
    if chat:
        raise InputError("apply_chat_template is for the pairs of a file")
    if len(text) and isinstance(text[0], tuple | list) and all(_is_pair(one) for one in text):
        tokenizer = tokenizer_of(model, "a list of pairs", "give a model that has one")
        rows = list[Pair]()
        for number, (a, b) in enumerate(text, start=1):
            with skipped.passed_over(), naming(f"pair {number}"):
                rows.append(tokenizer.pair(Example(a + b, len(a), is_response=True), **lengths))
        skipped.check_any_left(len(rows), "the list of pairs")
        return rows
    model.config.check_no_encoder("the perplexity of a text that is no list of pairs (input, target)")
    return None


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def read_ids(model: Model, text: Text) -> np.ndarray:
    """Returns int32[n] ids of a text for `model`. Takes the input of `evaluate`, and raises its errors."""
    if isinstance(text, str | os.PathLike):
        tokenizer = tokenizer_of(model, "a text file", "name one (--tokenizer), or give the text as token ids")
        if not as_path(text).is_file():
            raise_no_file("text", text)
        return held_out.read_text(uncompressed(as_path(text)), tokenizer, name=os.fspath(text))
    return _checked_ids(text, model.config)


def default_seq_len(config: ModelConfig) -> int:
    """Returns the default number of tokens that a model sees at a time: 1024, or its context length if that is less."""
    return min(_DEFAULT_SEQ_LEN, config.max_positions)


def plan(
    model: ModelOrPath | ModelConfig,
    *,
    upcycle: UpcycleSpec | Mapping[str, Any] | None = None,
    adapt: AdaptSpec | Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    optimizer: OptimizerSection | None = None,
    platform: str | None = None,
    tokens: int | None = None,
    pictures: int = 0,
    propose: "RecipeOrPath | None" = None,
) -> ModelPlan:
    """Counts parameters, bytes and FLOP of a model from its config alone, or of what it would become.

        >>> dense = moe_jax.tiny_model()
        >>> planned = moe_jax.plan(dense, upcycle={"experts": 4, "delta": "low-rank:2"}, mesh={"fsdp": 2})
        >>> planned.added_params, planned.training_bytes_per_chip.total
        (1216, 70400)

    Args:
      model: a model, a config, or the path of a model or of a config.json, ours or Hugging Face's.
      upcycle: a spec or options of `upcycle`: count the MoE that the model would become.
      adapt: a spec or options of `adapt`: count the model with these adapters; after `upcycle`, if both are given.
      mesh: sizes of the axes `data`, `fsdp`, `expert` and `tensor`: adds the bytes per chip of training, in float32
        except for frozen parameters, without activations.
      optimizer: with `mesh`: that of a recipe; by default AdamW.
      platform: a key of `data_sheets.CHIPS`, such as `v5e`, `h100` or `cpu`: adds the strategy by which experts
        would be applied there, and the least time of every one.
      tokens: number of tokens of a training batch on one device of the platform; default 8192.
      pictures: of a model that sees: number of pictures in every row, for the share of the image encoder.
      propose: a recipe. Adds the best ways to train the model by it on the platform, which then has a number of chips,
        as `v5p-16` or `h100:2x8` has: meshes, `remat`, microbatches, and dtypes if it does not fit with the recipe's.

    Raises:
      FileNotFoundError: if there is no config or recipe at the path.
      InputError: if it cannot be read, or the options do not go with it.
    """
    if isinstance(model, ModelConfig):
        config = model
    else:
        config = model.config if isinstance(model, Model) else read_config(os.fspath(model))
    origin = None if config.moe_layers else config
    if upcycle is not None:
        config = upcycled_config(config, upcycle if isinstance(upcycle, UpcycleSpec) else UpcycleSpec.of(upcycle))
    if adapt is not None:
        config = adapted_config(config, adapt if isinstance(adapt, AdaptSpec) else AdaptSpec.of(adapt))
    if tokens is not None and platform is None:
        raise InputError("tokens: only with platform")
    if propose is not None and (platform is None or tokens is not None):
        raise InputError("propose: needs a platform, such as v5p-16, and takes no tokens: the recipe says how many")
    return dataclasses.replace(
        make_plan(config, origin),
        vision=planned_vision(config, pictures),
        peft=tuned_parameters(config),
        training_bytes_per_chip=None if mesh is None else training_memory(config, mesh, optimizer=optimizer),
        strategies=None if platform is None or propose is not None else planned_strategies(config, platform, tokens),
        proposals=None if propose is None or platform is None else _proposals(config, propose, platform),
    )


def _proposals(config: ModelConfig, given: "RecipeOrPath", platform: str) -> "Proposals":
    # Here, for other plans need no program of training.
    from moe_jax.api.train import read_recipe
    from moe_jax.planning.proposals import propose

    recipe = read_recipe(given)
    teacher = None if recipe.distill is None else read_config(recipe.distill.teacher)
    return propose(recipe, config, platform, teacher=teacher)


def open_lazily(model: ModelOrPath) -> Model:
    """Returns the model of a path without reading its weights, so that errors in other input are reported first."""
    return model if isinstance(model, Model) else Model.of_source(open_model(model))


def why_not_finite(model: Model) -> str:
    """Returns why the results of a model are not finite, as far as its weights show it."""
    for path, spec in model.source.specs().items():
        if is_floating(spec.dtype) and not math.isfinite(largest_magnitude(model.source.read(path))):
            return f"{path} holds numbers that are not finite (moe-jax inspect --weights lists all such leaves)"
    return f"all weights are finite, so it is activations that are too large for {model.loading.compute_dtype}"


def tokenizer_of(model: Model, what: str, instead: str) -> Tokenizer:
    """Returns the model's tokenizer, which `what` needs; raises `InputError` if it has none."""
    if model.tokenizer is None:
        where = "a model in memory" if model.source.path == IN_MEMORY else model.source.path
        raise InputError(
            f"{where} has no tokenizer.json, which {what} needs (other formats, such as tokenizer.model, "
            f"are not read); put one there, or {instead}"
        )
    return model.tokenizer


def _checked_ids(ids: Sequence[int] | np.ndarray, config: ModelConfig) -> np.ndarray:
    """Returns int32[n] ids of a text; raises `InputError` if they cannot be scored."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) < 2:
        raise InputError(
            f"token ids of shape {array.shape} and dtype {array.dtype}; expected one dimension of at least 2 integers"
        )
    if array.min() < 0 or array.max() >= config.vocab_size:
        raise InputError(f"token ids from {array.min()} to {array.max()}; the vocabulary has {config.vocab_size}")
    return array.astype(np.int32)


Examples = str | os.PathLike[str] | Sequence[tuple[str, str | int]]


def classify(
    model: ModelOrPath,
    examples: Examples,
    *,
    labels: Sequence[str] | None = None,
    template: str | None = None,
    input_len: int | None = None,
    batch_size: int = 8,
    bad_documents: OnBad = "stop",
) -> classification.Classification:
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
      bad_documents: whether a text without tokens or with an unknown label, or a line of another form, is an error
        (`stop`), or is left out and counted (`skip`).

    Returns:
      `accuracy`, its 95% `interval` (Wilson), `correct`, `count`, `labels`, `confusion` (label by label given),
      `predictions`, `by` (`head` or `likelihood`), how many texts were `cut`, and how many bad ones were `skipped`,
      with the `problems` of the first of these.

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
    skipped = _skipped(bad_documents)
    found = _read(examples, template, skipped)
    names = classification.names_of_labels(found, labels, class_names(config), config.num_classes)
    # A decoder that only continues texts need not have learned to end them after a label.
    eos = "auto" if config.has_encoder else "never"
    tokenizer = Tokenizer(tokenizer_of(model, "classifying texts", "put one there").path, config, eos=eos)
    by_head = config.num_classes is not None
    good, rows = list[classification.Labelled](), list[Any]()
    for one in found:
        with skipped.passed_over(), naming(one.where):
            classification.check_label(one, names)
            if by_head:
                rows.append(classification.text_ids(config, tokenizer, one.text))
            else:
                rows.append(classification.label_pairs(config, tokenizer, one.text, names, input_len=input_len))
            good.append(one)
    skipped.check_any_left(len(good), "the labelled texts")
    graphdef, state = nnx.split(model.decoder)
    run = partial(held_out.score_rows, graphdef=graphdef, states=(state,), batch_size=batch_size, mesh=model.mesh)
    if by_head:
        scores, cut = classification.scores_by_head(run, config, rows, input_len=input_len)
    else:
        scores, cut = classification.scores_by_likelihood(run, rows)
    counted = classification.count_labels(good, scores, names, "head" if by_head else "likelihood", cut)
    return counted._replace(skipped=skipped.count, problems=tuple(skipped.problems))


def _read(examples: Examples, template: str | None, skipped: Skipped) -> list[classification.Labelled]:
    if isinstance(examples, str | os.PathLike):
        return classification.read_labelled(as_path(examples), template, skipped)
    if template is not None:
        raise InputError("a template goes with a file, whose lines have keys")
    numbered = enumerate(examples, start=1)
    found = [classification.Labelled(text, label, f"example {number}") for number, (text, label) in numbered]
    if not found or not all(isinstance(one.text, str) for one in found):
        raise InputError("examples are pairs of a text and its label, and there must be one at least")
    return found
