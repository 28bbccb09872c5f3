"""`moe-jax upcycle SRC DST`: a dense model becomes a Mixture-of-Experts.

The command compares the logits of both models on a probe batch, fails if they differ, and records the difference in
lineage.json. Its options, but for SRC and DST, are options of `plan` too.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from moe_jax.upcycle import Upcycled, UpcycleOptions


def _arg(default: str, metavar: str) -> object:
    """An option that shows its default, which `UpcycleOptions` holds; None here means that it was not given."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleFlags:
    """What the dense model is to become; None where the user said nothing."""

    method: Annotated[Literal["vanilla", "ders", "pesc"] | None, _arg("by --delta", "vanilla|ders|pesc")] = None
    """vanilla: the experts are copies of the FFN; ders: the FFN, which all share, plus a --delta; pesc: the FFN, which
    all share, and an adapter after it (Camelidae)."""
    experts: Annotated[int | None, _arg("8", "INT")] = None
    """Experts per MoE layer."""
    top_k: Annotated[int | None, _arg("2", "INT")] = None
    """Experts that a token goes to."""
    every: Annotated[int | None, _arg("2, of pesc 1", "INT")] = None
    """Every N-th layer becomes an MoE: with 2 layers 1, 3, 5, ... counted from 0, with 1 all of them."""
    layers: Annotated[tuple[int, ...] | None, _arg("by --every", "INT [INT ...]")] = None
    """The layers that become MoEs, counted from 0."""
    delta: Annotated[str | None, _arg("full", "full|low-rank:R|sparse:RATE")] = None
    """What an expert is: a full copy of the FFN; or the FFN, which all share, plus a product of rank R per matrix, or
    plus single entries per matrix, of which the share RATE (such as 0.9) is left out."""
    adapter: Annotated[str | None, _arg("512", "INT")] = None
    """pesc: width of an adapter."""
    scale: Annotated[float | None, _arg("0.25", "FLOAT")] = None
    """pesc: what the adapters' outputs are multiplied by."""
    rest: Annotated[str | None, _arg("qlora:64", "qlora:R|lora:R|frozen|full")] = None
    """pesc: what becomes of the dense model: frozen, with LoRA of rank R beside every kernel of attention and FFNs,
    over NF4 codes (qlora) or not (lora); frozen without; or trained with the adapters (full)."""
    freeze_base: bool = False
    """The shared FFN will not be trained (low-rank and sparse)."""
    gate: Annotated[
        Literal["topk_softmax", "softmax_topk", "top1"] | None,
        _arg("topk_softmax", "topk_softmax|softmax_topk|top1"),
    ] = None
    """Weights of the chosen experts: softmax over these, their share of the softmax over all, or that of the first."""
    universal: Annotated[Literal["none", "coder", "med"] | None, _arg("none", "none|coder|med")] = None
    """A copy of the FFN that sees every token. coder (XFT): its weight is 1 - p of the best expert, so that all weights
    sum to 1; med (Med-MoE): its weight is 1, and the MoE does not start as the dense model."""
    extended: bool = False
    """The universal FFN is one more delta over the FFN that the experts share (low-rank and sparse)."""
    balance_coef: Annotated[float | None, _arg("0.01", "FLOAT")] = None
    """Coefficient of the load-balancing loss in training."""
    z_coef: Annotated[float | None, _arg("0", "FLOAT")] = None
    """Coefficient of the router's z-loss in training."""
    cv_coef: Annotated[float | None, _arg("0", "FLOAT")] = None
    """Coefficient of the squared variation of importance and load, XFT's balance loss, in training."""
    seed: Annotated[int | None, _arg("0", "INT")] = None
    """Of routers, low-rank factors and sparse positions."""
    no_step0_check: bool = False
    """Leaves out the comparison with the dense model's logits, which also refuses gates that cannot equal them."""

    def options(self) -> "UpcycleOptions":
        """What to do, defaults filled in.

        Raises:
          InputError: for options that cannot be read or do not go with each other.
        """
        from moe_jax.upcycle import chosen_options

        return chosen_options(**self._given())

    def described(self, chosen: "UpcycleOptions") -> dict[str, Any]:
        """The options, for the lineage; `chosen` is what `options` returned."""
        from moe_jax.upcycle import describe_options

        return describe_options(chosen, **self._given())

    def _given(self) -> dict[str, Any]:
        flags = {field.name: getattr(self, field.name) for field in dataclasses.fields(UpcycleFlags)}
        return flags | {"seed": self.seed or 0}

    def any_given(self) -> bool:
        """Whether the user said anything about upcycling."""
        return any(getattr(self, field.name) != field.default for field in dataclasses.fields(UpcycleFlags))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(UpcycleFlags):
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
    from moe_jax.open_source import open_source
    from moe_jax.peft.trained_table import print_trained
    from moe_jax.plan import trained_leaves
    from moe_jax.terminal import console_for_tables, progress_bars
    from moe_jax.upcycle import upcycle

    chosen, seed = options.options(), options.seed or 0
    with progress_bars() as progress:
        result = upcycle(
            open_source(options.src),
            options.dst,
            chosen,
            seed=seed,
            check=not options.no_step0_check,
            described=options.described(chosen),
            progress=progress,
        )
    console = console_for_tables()
    console.print(_summary(options.dst, result))
    print_trained(console, result.config, trained_leaves(result.config))


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
