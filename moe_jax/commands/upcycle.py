"""`moe-jax upcycle SRC DST`: a dense model becomes a Mixture-of-Experts.

The command compares the logits of both models on a probe batch, fails if they differ, and records the difference in
lineage.json.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from moe_jax.upcycle import Upcycled


@dataclasses.dataclass(frozen=True)
class Options:
    """Turns a dense model into a Mixture-of-Experts that gives the same logits until it is trained."""

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """A dense model: a model directory or a Hugging Face directory."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Where the model directory appears; must not exist."""
    experts: int = 8
    """Experts per MoE layer."""
    top_k: int = 2
    """Experts that a token goes to."""
    every: int = 2
    """Every N-th layer becomes an MoE: with 2 layers 1, 3, 5, ... counted from 0, with 1 all of them."""
    layers: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT [INT ...]")] = None
    """The layers that become MoEs, counted from 0, instead of --every."""
    delta: Annotated[str, tyro.conf.arg(metavar="full|low-rank:R|sparse:RATE")] = "full"
    """What an expert is: a full copy of the FFN; or the FFN, which all share, plus a product of rank R per matrix, or
    plus single entries per matrix, of which the share RATE (such as 0.9) is left out."""
    freeze_base: bool = False
    """The shared FFN will not be trained (low-rank and sparse)."""
    seed: int = 0
    """Of routers, low-rank factors and sparse positions."""
    gate: Literal["topk_softmax", "softmax_topk", "top1"] = "topk_softmax"
    """Weights of the chosen experts: softmax over these, their share of the softmax over all, or that of the first."""
    balance_coef: float = 0.01
    """Coefficient of the load-balancing loss in training."""
    z_coef: float = 0.0
    """Coefficient of the router's z-loss in training."""
    no_step0_check: bool = False
    """Leaves out the comparison with the dense model's logits, which also refuses gates that cannot equal them."""


def run(options: Options) -> None:
    """Upcycles, and prints what came out.

    Raises:
      InputError: see `moe_jax.upcycle.upcycle`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from moe_jax.open_source import open_source
    from moe_jax.upcycle import UpcycleOptions, parse_delta, upcycle

    chosen = UpcycleOptions(
        num_experts=options.experts,
        top_k=options.top_k,
        every=options.every,
        layers=options.layers,
        bank=parse_delta(options.delta, freeze_base=options.freeze_base),
        gate=options.gate,
        balance_coef=options.balance_coef,
        z_coef=options.z_coef,
    )
    described = {name: value for name, value in dataclasses.asdict(options).items() if name not in ("src", "dst")}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        result = upcycle(
            open_source(options.src),
            options.dst,
            chosen,
            seed=options.seed,
            check=not options.no_step0_check,
            described=described,
            progress=progress,
        )
    Console().print(_summary(options.dst, result))


def _summary(dst: Path, result: "Upcycled") -> "Table":
    from rich.table import Table

    moe_layers = result.config.moe_layers
    moe = result.config.layers[moe_layers[0]].mlp
    table = Table(title=str(dst), title_justify="left", show_header=False)
    table.add_row("MoE layers", f"{len(moe_layers)} of {result.config.num_layers}: {', '.join(map(str, moe_layers))}")
    table.add_row("experts", f"{moe.num_experts}, {moe.top_k} per token, {moe.bank.kind}")
    table.add_row("parameters", f"{result.dense.params:,} -> {result.upcycled.params:,}")
    table.add_row("added", f"{result.upcycled.params - result.dense.params:,}")
    table.add_row("bytes", f"{result.dense.bytes:,} -> {result.upcycled.bytes:,}")
    if result.step0 is None:
        table.add_row("step-0 difference", "not checked")
    else:
        step0 = result.step0
        table.add_row("step-0 difference", f"{step0.difference:.2g} (largest logit {step0.largest:.3g})")
    return table
