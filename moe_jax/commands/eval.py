"""`moe-jax eval MODEL`: perplexity on a text or on pairs (`--text FILE`), or label accuracy (`--classify FILE`)."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from moe_jax.commands import BaseFlag

if TYPE_CHECKING:
    from moe_jax.api.model import Model


@dataclasses.dataclass(frozen=True)
class Options(BaseFlag):
    """Perplexity of a model on a text, or on the targets of pairs; or how often it gives texts the right labels.

    A text is tokenised whole without special tokens and cut into consecutive windows, the last of which may be shorter;
    every token but the first of each window is scored. Pairs are JSON lines (*.jsonl) of {"input", "target"}, or
    {"prompt", "response"}, which means the same: the tokens of the target are scored, given the input. A model with an
    encoder is scored on pairs alone.

    Labelled texts are JSON lines of a label and a text, in the style of GLUE. A head for classes scores them at the
    last token; other models are asked how likely they are to say each label after the text, or in answer to it.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory, an adapter directory, a Hugging Face directory, or RUN@STEP: a checkpoint of a run."""
    text: Path | None = None
    """A text file, or pairs as JSON lines."""
    classify: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON lines with "label", a string or a number, and "text", "sentence", or "sentence1" and "sentence2", or the
    like. Prints the accuracy with its 95% interval (Wilson), and the labels given."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME,...")] = None
    """With --classify: names of the labels 0, 1, ..., which are also what is said. By default those of the model's
    classes, or the strings that occur as labels."""
    template: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """With --classify: what the model is given, as in "sst2 sentence: {sentence}"."""
    seq_len: int | None = None
    """Length of a window in tokens, or of targets; by default 1024, or the model's context length if shorter."""
    input_len: int | None = None
    """Length of an encoder's inputs, or of texts to label; by default the same. Longer ones are cut, and counted."""
    batch_size: int = 8
    """Number of windows or pairs computed at once. Does not change the result."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the matrix products."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A tokenizer.json, or a directory that holds one, instead of the model's own."""
    split: bool = False
    """Splits the parameters over the devices, instead of copying them to each."""
    json: bool = False
    """Prints JSON and nothing else: tokens, nll (mean, natural log), perplexity, total_nll, windows (or pairs), cut,
    seq_len; or accuracy, interval, correct, count, labels, confusion, predictions, by, cut."""


def run(options: Options) -> None:
    """Scores the text, or the labels, and prints the result.

    Raises:
      FileNotFoundError, InputError: bad input, or a perplexity that is not finite.
    """
    from moe_jax.api.model import Loading, Model
    from moe_jax.api.run import default_seq_len, evaluate
    from moe_jax.errors import InputError
    from moe_jax.sharding import make_mesh
    from moe_jax.train.pair_evaluation import holds_pairs

    if options.batch_size < 1:
        raise InputError(f"--batch-size {options.batch_size} must be at least 1")
    if (options.text is None) == (options.classify is None):
        raise InputError("give either --text FILE or --classify FILE")
    if options.classify is None and (options.labels is not None or options.template is not None):
        raise InputError("--labels and --template go with --classify FILE")
    if options.classify is not None and options.seq_len is not None:
        raise InputError("--seq-len goes with --text; with --classify, --input-len says how much of a text is read")
    mesh = make_mesh({"fsdp" if options.split else "data": -1})
    model = Model.of_source(options.open(options.model), Loading(compute_dtype=options.compute_dtype, mesh=mesh))
    if options.tokenizer is not None:
        model.tokenizer_files = (_tokenizer_file(options.tokenizer),)
    if options.classify is not None:
        _classify(model, options)
        return
    assert options.text is not None
    seq_len = default_seq_len(model.config) if options.seq_len is None else options.seq_len
    most = model.config.max_positions
    if seq_len > most:
        print(f"warning: {options.model} was made for {most} positions, not {seq_len}", file=sys.stderr)
    result = evaluate(model, options.text, seq_len=seq_len, input_len=options.input_len, batch_size=options.batch_size)
    if result.cut:
        print(f"note: {result.cut:,} of {result.windows:,} pairs are too long and were cut", file=sys.stderr)
    result = result._asdict() | {"seq_len": seq_len, "model": str(options.model), "text": str(options.text)}
    if options.json:
        print(json.dumps(result))
        return
    windows = f"windows of {seq_len}" if not holds_pairs(options.text, model.config) else "pairs"
    print(f"{result['tokens']:,} tokens scored in {result['windows']:,} {windows}")
    print(f"nll {result['nll']:.6f}  perplexity {result['perplexity']:.4f}")


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {file}")
    if file.name != "tokenizer.json":
        from moe_jax.errors import InputError

        raise InputError(f"--tokenizer {path}: expected a file named tokenizer.json, or the directory that holds it")
    return file


def _classify(model: "Model", options: Options) -> None:
    """Labels the texts and prints how often that was right, and which labels were given to which."""
    from moe_jax.api.classify import classify

    labels = None if options.labels is None else [name.strip() for name in options.labels.split(",")]
    assert options.classify is not None
    result = classify(
        model,
        options.classify,
        labels=labels,
        template=options.template,
        input_len=options.input_len,
        batch_size=options.batch_size,
    )
    if result.cut:
        print(f"note: {result.cut:,} of {result.count:,} texts are too long and were cut", file=sys.stderr)
    if options.json:
        print(json.dumps(result._asdict() | {"model": str(options.model), "file": str(options.classify)}))
        return
    low, high = result.interval
    how = "the head" if result.by == "head" else "the likelihood of the labels"
    print(f"accuracy {result.accuracy:.4f} (95%: {low:.4f} to {high:.4f})")
    print(f"{result.correct:,} of {result.count:,} texts are labelled as they should be, by {how}")
    width = max(5, *(len(name) for name in result.labels), len(f"{result.count:,}"))
    print(f"{'label':>{width}}  given " + "  ".join(f"{name:>{width}}" for name in result.labels))
    for name, row in zip(result.labels, result.confusion, strict=True):
        print(f"{name:>{width}}        " + "  ".join(f"{count:>{width},}" for count in row))
