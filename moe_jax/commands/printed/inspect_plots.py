"""`moe-jax inspect MODEL --plots DIR`: measures the experts of a model and draws what it finds."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_jax.core.errors import InputError

if TYPE_CHECKING:
    from moe_jax.model_io.model_source import ModelSource
    from moe_jax.training.expert_load import ExpertLoad

_DEFAULT_SEQ_LEN = 1024
_BATCH_SIZE = 8


def check_options(plots: Path | None, text: Path | None, seq_len: int | None, split: bool) -> None:
    """Raises `InputError` for options that do not go together, or a folder that exists."""
    from moe_jax.files.staging import check_target

    if plots is None and (text is not None or seq_len is not None):
        raise InputError(f"--{'text' if text is not None else 'seq-len'} belongs to --plots DIR")
    if text is None and (seq_len is not None or split):
        raise InputError(f"--{'split' if split else 'seq-len'} belongs to --text FILE")
    if plots is not None:
        check_target(plots)


def draw(source: "ModelSource", dst: Path, *, text: Path | None, seq_len: int | None, split: bool) -> list[Path]:
    """Measures the experts and writes the plots. Without a text, only those that need no forward pass.

    Args:
      source: the model.
      dst: the folder to make.
      text: a text file on which the load of the experts is measured.
      seq_len: length of a window in tokens; None: 1024, or the model's context length if that is shorter.
      split: whether the model's parameters are split over the devices.

    Returns:
      The files.

    Raises:
      FileNotFoundError, InputError: bad input, such as a dense model. Nothing is left behind.
    """
    from moe_jax.core.terminal import progress_bars
    from moe_jax.figures import comparable_layers, measure_similarity, write_figures

    config = source.config
    if not config.moe_layers:
        raise InputError(f"{source.path} is dense: --plots draws experts, and it has none")
    compared = comparable_layers(config)
    if not compared and text is None:
        raise InputError(
            f"--plots compares the kernels of experts, and those of {source.path} are adapters, or have LoRA or NF4; "
            "draw those of its base, or give --text FILE to draw their load alone"
        )
    most = config.max_positions
    seq_len = min(_DEFAULT_SEQ_LEN, most) if seq_len is None else seq_len
    if seq_len > most:
        print(f"warning: {source.path} was made for {most} positions, not {seq_len}", file=sys.stderr)
    layers = []
    with progress_bars() as progress:
        # This comes first because it checks the text.
        load = None if text is None else _measure_load(source, text, seq_len, split)
        for done, layer in enumerate(compared, start=1):
            layers.append(measure_similarity(source, layer))
            progress("comparing experts", done, len(compared))
    described: dict[str, Any] = {}
    if load is not None:
        tried_on = {"path": str(text), "tokens": load.tokens, "seq_len": seq_len}
        described = {"shares": load.shares, "text": tried_on}
    return write_figures(dst, layers, name="/".join(source.path.resolve().parts[-2:]), **described)


def _measure_load(source: "ModelSource", text: Path, seq_len: int, split: bool) -> "ExpertLoad":
    from moe_jax.data.tokens.tokenizer import Tokenizer, find_tokenizer
    from moe_jax.distributed.sharding import make_mesh
    from moe_jax.evaluation.held_out_loss import check_seq_len, read_text
    from moe_jax.model_io.loading import load_model
    from moe_jax.training.expert_load import measure_load

    check_seq_len(seq_len)
    ids = read_text(text, Tokenizer(find_tokenizer(source.tokenizer_files, source.path), source.config))
    mesh = make_mesh({"fsdp" if split else "data": -1})
    model = load_model(source, mesh=mesh)
    return measure_load(model, ids, seq_len=seq_len, batch_size=_BATCH_SIZE, mesh=mesh)
