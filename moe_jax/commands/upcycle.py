"""`moe-jax upcycle SRC DST`: a dense model becomes a Mixture-of-Experts.

The command compares the logits of both models on a probe batch, fails if they differ, and records the difference in
lineage.json.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from moe_jax.commands.upcycling import Upcycling

if TYPE_CHECKING:
    from rich.table import Table

    from moe_jax.upcycle import Upcycled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Upcycling):
    """Turns a dense model into a Mixture-of-Experts that gives the same logits until it is trained.

    With --method pesc, unless --rest is full, what is written holds the adapters alone and refers to the dense model,
    which has to stay where it is.
    """

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """A dense model: a model directory or a Hugging Face directory."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Where the model directory appears; must not exist."""


def run(options: Options) -> None:
    """Upcycles, and prints what came out.

    Raises:
      InputError: see `moe_jax.upcycle`.
    """
    from rich.console import Console

    from moe_jax.commands.progress import progress_bars
    from moe_jax.commands.trained import print_default_training
    from moe_jax.open_source import open_source
    from moe_jax.upcycle import upcycle

    chosen, seed = options.options(), options.seed or 0
    pesc = chosen.bank.adapter is not None
    described = {
        "method": options.method,
        "experts": chosen.num_experts,
        "top_k": chosen.top_k,
        "every": chosen.every if chosen.layers is None else None,
        "layers": chosen.layers,
        "delta": None if pesc else options.delta or "full",
        "freeze_base": options.freeze_base,
        "gate": chosen.gate if chosen.universal == "none" else None,
        "universal": chosen.universal,
        "extended": chosen.extended,
        "balance_coef": chosen.balance_coef,
        "z_coef": chosen.z_coef,
        "cv_coef": chosen.cv_coef,
        "seed": seed,
        "step0_check": not options.no_step0_check,
    }
    if pesc:
        described |= {"adapter": dataclasses.asdict(chosen.bank.adapter), "rest": dataclasses.asdict(chosen.rest)}
    with progress_bars() as progress:
        result = upcycle(
            open_source(options.src),
            options.dst,
            chosen,
            seed=seed,
            check=not options.no_step0_check,
            described=described,
            progress=progress,
        )
    Console().print(_summary(options.dst, result))
    print_default_training(result.config)


def _summary(dst: Path, result: "Upcycled") -> "Table":
    from rich.table import Table

    moe_layers = result.config.moe_layers
    moe = result.config.layers[moe_layers[0]].mlp
    table = Table(title=str(dst), title_justify="left", show_header=False)
    table.add_row("MoE layers", f"{len(moe_layers)} of {result.config.num_layers}: {', '.join(map(str, moe_layers))}")
    table.add_row("experts", f"{moe.num_experts}, {moe.top_k} per token, {moe.bank.kind}")
    if moe.universal != "none":
        table.add_row("universal FFN", f"{moe.universal}, {'one more delta' if moe.extended else 'beside the experts'}")
    table.add_row("parameters", f"{result.dense.params:,} -> {result.upcycled.params:,}")
    table.add_row("added", f"{result.upcycled.params - result.dense.params:,}")
    table.add_row("bytes", f"{result.dense.bytes:,} -> {result.upcycled.bytes:,}")
    if result.own is not None:
        table.add_row("stored here", f"{result.own.params:,} parameters, {result.own.bytes:,} bytes")
    if result.step0 is None:
        table.add_row("step-0 difference", "not checked")
    else:
        step0 = result.step0
        table.add_row("step-0 difference", f"{step0.difference:.2g} (largest logit {step0.largest:.3g})")
    if result.quantization is not None:
        table.add_row("NF4's own difference", f"{result.quantization.difference:.2g}")
    return table
