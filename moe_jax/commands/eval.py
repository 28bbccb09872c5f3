"""`moe-jax eval MODEL --text FILE`: the perplexity of a model on a text."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from moe_jax.commands import BaseFlag


@dataclasses.dataclass(frozen=True)
class Options(BaseFlag):
    """Perplexity of a model on a text.

    The text is tokenised whole without special tokens and cut into consecutive windows, the last of which may be
    shorter; every token but the first of each window is scored.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory, an adapter directory, a Hugging Face directory, or RUN@STEP: a checkpoint of a run."""
    text: Path
    """A text file."""
    seq_len: int | None = None
    """Length of a window in tokens; by default 1024, or the model's context length if that is shorter."""
    batch_size: int = 8
    """Number of windows computed at once. Does not change the result."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the matrix products."""
    split: bool = False
    """Splits the parameters over the devices, instead of copying them to each."""
    json: bool = False
    """Prints JSON and nothing else: tokens, nll (mean, natural log), perplexity, total_nll, windows, seq_len."""


def run(options: Options) -> None:
    """Scores the text and prints the result.

    Raises:
      FileNotFoundError, InputError: bad input, or a perplexity that is not finite.
    """
    from moe_jax.api.model import Loading, Model
    from moe_jax.api.run import default_seq_len, evaluate
    from moe_jax.errors import InputError
    from moe_jax.sharding import make_mesh

    if options.batch_size < 1:
        raise InputError(f"--batch-size {options.batch_size} must be at least 1")
    mesh = make_mesh({"fsdp" if options.split else "data": -1})
    model = Model.of_source(options.open(options.model), Loading(compute_dtype=options.compute_dtype, mesh=mesh))
    seq_len = default_seq_len(model.config) if options.seq_len is None else options.seq_len
    most = model.config.max_positions
    if seq_len > most:
        print(f"warning: {options.model} was made for {most} positions, not {seq_len}", file=sys.stderr)
    result = evaluate(model, options.text, seq_len=seq_len, batch_size=options.batch_size)
    result = result._asdict() | {"seq_len": seq_len, "model": str(options.model), "text": str(options.text)}
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['tokens']:,} tokens scored in {result['windows']:,} windows of {seq_len}")
    print(f"nll {result['nll']:.6f}  perplexity {result['perplexity']:.4f}")
