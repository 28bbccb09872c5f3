"""Adapters and plots, as `inspect` shows them."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_jax.core.errors import InputError
from moe_jax.core.formatting import index_set

if TYPE_CHECKING:
    import jax

    from moe_jax.evaluation.held_out import ExpertLoad
    from moe_jax.model_io.model_source import ModelSource
    from moe_jax.models import LayerConfig, ModelConfig


def adapter_lines(config: "ModelConfig") -> list[str]:
    """Returns one line for each kind of adapter, LoRA or NF4 kernel, with the layers that have it."""
    layers_of: dict[str, list[int]] = {}
    for index, layer in enumerate(config.layers):
        for line in _of_layer(layer):
            layers_of.setdefault(line, []).append(index)
    return [line.format(layers=f"layers/{index_set(layers)}") for line, layers in layers_of.items()]


def described_base(
    base: "ModelSource", own: "Mapping[str, jax.ShapeDtypeStruct]", sizes: dict[str, int]
) -> dict[str, Any]:
    """Returns the base of a tuned model, and the leaves that are stored without it, as JSON.

    Args:
      base: the base.
      own: shapes and dtypes of the leaves that the tuned model stores itself.
      sizes: numbers of parameters of the tuned model, by leaf path.
    """
    return {
        "base": {"path": str(base.path), "fingerprint": base.fingerprint()},
        "own": {
            "leaves": list(own),
            "parameters": sum(sizes[path] for path in own),
            "bytes": sum(spec.size * spec.dtype.itemsize for spec in own.values()),
        },
    }


def in_words(value: Any) -> str:
    """Returns a config as `(name value, ...)`; anything else as a string."""
    if not isinstance(value, dict):
        return str(value)
    return "(" + ", ".join(f"{name} {one}" for name, one in value.items()) + ")"


def _of_layer(layer: "LayerConfig") -> Iterator[str]:
    from moe_jax.models import MoEConfig

    mlp = layer.mlp
    moe = mlp if isinstance(mlp, MoEConfig) else None
    modules = {"attention": layer.attention, "the FFN" if moe is None else "the experts": moe.expert if moe else mlp}
    for name, module in modules.items():
        if module.nf4:
            yield f"NF4 kernels in {name} of {{layers}}"
        if module.lora is not None:
            yield f"LoRA beside {name} of {{layers}}: {_lora(module.lora)}"
    if moe is not None and moe.router_lora is not None:
        yield f"LoRA beside the router of {{layers}}: {_lora(moe.router_lora)}"
    if moe is not None and moe.perft is not None:
        perft = dataclasses.asdict(moe.perft)
        chosen = "" if moe.perft.top_k is None else f", top {moe.perft.top_k}, gate {moe.perft.gate}"
        adapter = in_words(perft["adapter"])
        yield f"PERFT in {{layers}}: {moe.perft.variant}, {moe.perft.num_experts} adapters{chosen}, adapter {adapter}"


def _lora(lora: Any) -> str:
    return f"{', '.join(lora.targets)}; rank {lora.rank}, scale {lora.scale:g}, dropout {lora.dropout:g}"


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
    from moe_jax.data.tokenizer import Tokenizer, find_tokenizer
    from moe_jax.distributed.sharding import make_mesh
    from moe_jax.evaluation.held_out import check_seq_len, measure_load, read_text
    from moe_jax.model_io.loading import load_model

    check_seq_len(seq_len)
    ids = read_text(text, Tokenizer(find_tokenizer(source.tokenizer_files, source.path), source.config))
    mesh = make_mesh({"fsdp" if split else "data": -1})
    model = load_model(source, mesh=mesh)
    return measure_load(model, ids, seq_len=seq_len, batch_size=_BATCH_SIZE, mesh=mesh)
