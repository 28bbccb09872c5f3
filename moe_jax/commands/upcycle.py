"""`moe-jax upcycle SRC DST`: a dense model becomes an MoE, or an MoE a larger one; `plan` takes the same options."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from moe_jax.commands.options import check_text_file, command_options, given_to
from moe_jax.upcycling.spec import UpcycleSpec

if TYPE_CHECKING:
    from rich.table import Table

    from moe_jax.upcycling import Upcycled


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Turns a dense model into a Mixture-of-Experts that gives the same logits until it is trained.

    The FFN of a layer is its feed-forward network. Experts begin as equal copies of it, so that it makes no difference
    which of them the router, which is new and random, chooses.

    An MoE becomes a larger one: its experts are copied, and with them what the router knows of them, up to a little
    noise (--router-noise).

    With --method pesc, unless --rest is full, the output is an adapter directory: it holds only the adapters and refers
    to the dense model, which has to stay where it is.
    """

    models: ClassVar[tuple[str, ...]] = ("src", "base", "experts_from")
    texts: ClassVar[tuple[str, ...]] = ("text",)
    made: ClassVar[tuple[str, ...]] = ("dst",)

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """A dense model, or an MoE: a model directory, a Hugging Face directory, a GGUF file, RUN@STEP (a checkpoint of a
    training run), or org/name on the Hugging Face Hub."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Where the model directory appears; must not exist."""

    def check_places(self) -> None:
        """Raises an error if a text for the routers is not there, or is empty."""
        for text in vars(self)["router_from"]:
            if text.startswith("@"):
                check_text_file(text[1:])


Options = command_options(_Command, UpcycleSpec)
GROUPS = {
    "of an MoE, which becomes a larger one": ("copies_by", "router_noise", "shared_from"),
    "which layers get experts, and of what form": ("method", "experts", "top_k", "every", "first", "layers", "delta"),
    "how a token's experts are weighted": ("gate", "router", "router_bias", "universal", "extended"),
    "training, kept in the model's config": (
        *("balance_coef", "balance_choices", "z_coef", "cv_coef", "capacity_factor", "capacity_rows", "freeze_base"),
    ),
    "experts that begin unlike each other": (
        "noise",
        "drop",
        "granularity",
        "experts_from",
        "rest_from",
        "router_from",
        "router_weights",
    ),
    "of --method pesc": ("adapter", "scale", "rest"),
}
EXAMPLES = """
# four experts in every second layer, which share its FFN and differ by deltas of rank 16
moe-jax upcycle SmolLM2-135M-Instruct moe --experts 4 --top-k 2 --delta low-rank:16
# every expert a copy of the FFN, in all layers
moe-jax upcycle llama-dir moe-dir --experts 8 --top-k 2 --every 1
# twice as many experts as an MoE has, more of those that a text needs, and as many of them for a token as before
moe-jax upcycle olmoe-dir large-dir --experts 128 --copies-by use --text text.txt
"""


def run(options: _Command) -> None:
    """Upcycles the model, and prints a summary of the result."""
    import moe_jax
    from moe_jax.core.terminal import console_for_tables
    from moe_jax.distributed.processes import join_processes
    from moe_jax.peft.trained import print_trained
    from moe_jax.planning.model_costs import trained_leaves

    spec = given_to(UpcycleSpec, options)
    join_processes()
    made = moe_jax.upcycle(options.src, options.dst, spec).report
    console = console_for_tables()
    console.print(_summary(options.dst, made))
    print_trained(console, made.config, trained_leaves(made.config))


def _summary(dst: Path, result: "Upcycled") -> "Table":
    from rich.table import Table

    moe_layers = result.config.moe_layers
    moe = result.config.moe(moe_layers[0])
    table = Table(title=str(dst), title_justify="left", show_header=False)
    table.add_row("MoE layers", f"{len(moe_layers)} of {result.config.num_layers}: {', '.join(map(str, moe_layers))}")
    table.add_row("experts", f"{moe.num_experts}, {moe.top_k} per token, {moe.bank.kind}")
    if result.copies is not None:
        fewest, most = min(map(min, result.copies.values())), max(map(max, result.copies.values()))
        table.add_row("each expert became", f"{fewest}" if fewest == most else f"{fewest} to {most}")
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
        meant = "" if result.differs is None else f", as is meant: {result.differs}"
        table.add_row("step-0 difference", f"{step0.difference:.2g} (largest logit {step0.largest:.3g}){meant}")
    if result.quantization is not None:
        table.add_row("NF4's own difference", f"{result.quantization.difference:.2g} in a logit")
    if result.on_text is not None:
        table.add_row(f"NF4 on {result.on_text.text}", result.on_text.in_words())
    return table
