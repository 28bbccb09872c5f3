"""`moe-jax upcycle SRC DST`: a dense model becomes a Mixture-of-Experts.

The command compares the logits of both models on a probe batch, fails if they differ, and records the difference in
lineage.json. `plan` takes the same options, except for SRC and DST.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from moe_jax.commands import BaseFlag, optional

if TYPE_CHECKING:
    from rich.table import Table

    from moe_jax.upcycling import Upcycled, UpcycleOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleFlags:
    """Which MoE to make of the dense model. An option that was not given is None."""

    method: Annotated[Literal["vanilla", "ders", "pesc"] | None, optional("vanilla|ders|pesc", "by --delta")] = None
    """vanilla: every expert is a copy of the FFN; ders: the experts share the FFN, and each adds a --delta to it; pesc:
    the experts share the FFN, and each has an adapter after it (Camelidae)."""
    experts: Annotated[int | None, optional("INT", "8")] = None
    """Experts per MoE layer; with --granularity, copies of the FFN that are cut into experts."""
    top_k: Annotated[int | None, optional("INT", "2")] = None
    """Experts that a token is routed to."""
    every: Annotated[int | None, optional("INT", "2, of pesc 1")] = None
    """Every N-th layer becomes an MoE: with 2, the layers 1, 3, 5, ... counted from 0; with 1, all layers."""
    layers: Annotated[tuple[int, ...] | None, optional("INT [INT ...]", "by --every")] = None
    """The layers that become MoEs, counted from 0."""
    delta: Annotated[str | None, optional("full|low-rank:R|sparse:RATE", "full")] = None
    """The form of an expert: full, a copy of the FFN; or the shared FFN plus a delta per matrix, either of rank R or
    sparse, with the share RATE of its entries (such as 0.9) fixed to zero."""
    adapter: Annotated[str | None, optional("INT", "512")] = None
    """pesc: the width of an adapter."""
    scale: Annotated[float | None, optional("FLOAT", "0.25")] = None
    """pesc: the factor by which the adapters' outputs are multiplied."""
    rest: Annotated[str | None, optional("qlora:R|lora:R|frozen|full", "qlora:64")] = None
    """pesc: how the parameters of the dense model are treated. lora: frozen, with LoRA of rank R on every kernel of
    attention and FFNs; qlora: the same over NF4 kernels; frozen: frozen without LoRA; full: trained."""
    freeze_base: bool = False
    """Freezes the shared FFN in training (low-rank and sparse)."""
    gate: Annotated[
        Literal["topk_softmax", "softmax_topk", "top1"] | None,
        optional("topk_softmax|softmax_topk|top1", "topk_softmax"),
    ] = None
    """Weights of the chosen experts: the softmax over their logits (topk_softmax); their part of the softmax over all
    experts (softmax_topk); or that of the first alone (top1)."""
    universal: Annotated[Literal["none", "coder", "med"] | None, optional("none|coder|med", "none")] = None
    """Adds a universal FFN, a copy of the FFN that sees every token. coder (XFT): its weight is 1 minus the largest
    router probability, so that all weights sum to 1; med (Med-MoE): its weight is 1, and the MoE does not start with
    the dense model's logits."""
    extended: bool = False
    """Stores the universal FFN as one more delta over the shared FFN (low-rank and sparse)."""
    balance_coef: Annotated[float | None, optional("FLOAT", "0.01")] = None
    """Coefficient of the loss that makes the router use all experts alike, in training."""
    z_coef: Annotated[float | None, optional("FLOAT", "0")] = None
    """Coefficient of the router's z-loss, which keeps its logits small, in training."""
    cv_coef: Annotated[float | None, optional("FLOAT", "0")] = None
    """Coefficient in training of XFT's balance loss, the squared coefficients of variation of importance and load."""
    noise: Annotated[float | None, optional("STD", "0")] = None
    """Adds Gaussian noise to the kernels of every expert, with STD times the standard deviation of the kernel. Needs
    --delta full. Step 0: not the dense model's logits; the check says how far off they are, and does not fail."""
    drop: Annotated[float | None, optional("R", "0")] = None
    """Drop-Upcycling (Nakamura et al. 2025): the share R, in the paper 0.5, of every expert's neurons, in gate, up and
    down the same, are drawn anew, from a normal distribution with the mean and standard deviation of what they replace.
    Needs --delta full. Step 0: not the dense model's logits; the check says how far off they are, and does not fail."""
    granularity: Annotated[int | None, optional("G", "1")] = None
    """Granular upcycling (He et al. 2024): every copy of the FFN is cut along its neurons into G experts, so that there
    are G times --experts experts, of which G times --top-k are chosen. At first the router chooses all pieces of a copy
    or none. Their outputs are scaled: by G (gate topk_softmax), or by G times --experts / --top-k (softmax_topk). Needs
    --delta full. Step 0: the dense model's logits with topk_softmax, since the pieces add up to the FFN; with
    softmax_topk only as far as the router finds all experts alike, and the check then says how far off they are."""
    experts_from: Annotated[tuple[Path, ...] | None, optional("DIR [DIR ...]", "SRC alone")] = None
    """Branch-Train-MiX (Sukhbaatar et al. 2024): expert i has the FFN of the i-th of these models, which have SRC's
    architecture and tokenizer; all else is their mean. SRC gives an expert only if it is named too. Needs --delta full.
    Step 0: not SRC's logits; the check says how far off they are, and does not fail."""
    rest_from: Annotated[Literal["mean", "base"] | None, optional("mean|base", "mean")] = None
    """With --experts-from, what is no expert (attention, norms, embeddings, other FFNs): the mean, or that of SRC."""
    router_from: Annotated[tuple[str, ...] | None, optional("TEXT [TEXT ...]", "random")] = None
    """Routers begin from texts, one for each expert (with --granularity, each copy), or @FILE for a text in a file: the
    row of an expert is the mean of what the layer's FFN is given for the first 512 tokens of its text, divided by
    its length. Goes with every --delta. Step 0: unchanged by it, for it only chooses among experts."""
    seed: Annotated[int | None, optional("INT", "0")] = None
    """Seed of all draws: routers, low-rank factors, sparse positions, noise, dropped neurons."""
    no_step0_check: bool = False
    """Skips the comparison with the dense model's logits, which otherwise refuses gates that cannot reproduce them."""

    def options(self) -> "UpcycleOptions":
        """The options of `moe_jax.upcycle`, with defaults filled in.

        Raises:
          InputError: for options that cannot be read or contradict each other.
        """
        from moe_jax.upcycling import chosen_options

        return chosen_options(**self._given())

    def described(self, chosen: "UpcycleOptions") -> dict[str, Any]:
        """The options, for the lineage; `chosen` is what `options` returned."""
        from moe_jax.upcycling import describe_options

        return describe_options(chosen, **self._given())

    def _given(self) -> dict[str, Any]:
        flags = {field.name: getattr(self, field.name) for field in dataclasses.fields(UpcycleFlags)}
        return flags | {"seed": self.seed or 0}

    def any_given(self) -> bool:
        """Whether the user gave any of these options."""
        return any(getattr(self, field.name) != field.default for field in dataclasses.fields(UpcycleFlags))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(BaseFlag, UpcycleFlags):
    """Turns a dense model into a Mixture-of-Experts that gives the same logits until it is trained.

    The FFN of a layer is its feed-forward network. Experts begin as equal copies of it, so that it makes no difference
    which of them the router, which is new and random, chooses.

    With --method pesc, unless --rest is full, the output is an adapter directory: it holds only the adapters and refers
    to the dense model, which has to stay where it is.
    """

    in_buckets: ClassVar[tuple[str, ...]] = ("src", "dst", "base", "text", "experts_from")

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """A dense model: a model directory, a Hugging Face directory, a GGUF file, RUN@STEP (a checkpoint of a training
    run), or org/name on the Hugging Face Hub."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Where the model directory appears; must not exist."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: a built-in text)")] = None
    """With NF4 kernels (--rest qlora): a text on which the loss before and after quantising, and the KL divergence, are
    shown; its first 512 tokens."""
    allow_nonfinite: bool = False
    """Goes on where weights are NaN or infinite, instead of refusing."""


GROUPS = {
    "which layers get experts, and of what form": (
        "method",
        "experts",
        "top_k",
        "every",
        "layers",
        "delta",
    ),
    "how a token's experts are weighted": (
        "gate",
        "universal",
        "extended",
    ),
    "training, kept in the model's config": (
        "balance_coef",
        "z_coef",
        "cv_coef",
        "freeze_base",
    ),
    "experts that begin unlike each other": (
        "noise",
        "drop",
        "granularity",
        "experts_from",
        "rest_from",
        "router_from",
    ),
    "of --method pesc": (
        "adapter",
        "scale",
        "rest",
    ),
}
EXAMPLES = """
# four experts in every second layer, which share its FFN and differ by deltas of rank 16
moe-jax upcycle SmolLM2-135M-Instruct moe --experts 4 --top-k 2 --delta low-rank:16
# every expert a copy of the FFN, in all layers
moe-jax upcycle llama-dir moe-dir --experts 8 --top-k 2 --every 1
"""


def run(options: Options) -> None:
    """Upcycles, and prints a summary of the result.

    Raises:
      InputError: see `moe_jax.upcycle`.
    """
    from moe_jax.api.built_in_text import probe_text
    from moe_jax.api.open_source import open_source
    from moe_jax.api.prompts import read_prompts
    from moe_jax.core.terminal import console_for_tables, progress_bars
    from moe_jax.distributed.processes import is_first_process, join_processes
    from moe_jax.peft.trained_table import print_trained
    from moe_jax.planning.model_costs import trained_leaves
    from moe_jax.upcycling import upcycle, upcycled_config

    chosen, seed, check = options.options(), options.seed or 0, not options.no_step0_check
    join_processes()
    source = options.open(options.src)
    text = probe_text(source, upcycled_config(source.config, chosen), options.text, check=check)
    with progress_bars(shown=is_first_process()) as progress:
        result = upcycle(
            source,
            options.dst,
            chosen,
            seed=seed,
            check=check,
            text=text,
            prompts=read_prompts(source, options.router_from or ()),
            experts_from=[open_source(path) for path in options.experts_from or ()],
            allow_nonfinite=options.allow_nonfinite,
            described=options.described(chosen),
            progress=progress,
        )
    if not is_first_process():
        return
    console = console_for_tables()
    console.print(_summary(options.dst, result))
    print_trained(console, result.config, trained_leaves(result.config))


def _summary(dst: Path, result: "Upcycled") -> "Table":
    from rich.table import Table

    moe_layers = result.config.moe_layers
    moe = result.config.moe(moe_layers[0])
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
        meant = "" if result.differs is None else f", as is meant: {result.differs}"
        table.add_row("step-0 difference", f"{step0.difference:.2g} (largest logit {step0.largest:.3g}){meant}")
    if result.quantization is not None:
        table.add_row("NF4's own difference", f"{result.quantization.difference:.2g} in a logit")
    if result.on_text is not None:
        table.add_row(f"NF4 on {result.on_text.text}", result.on_text.in_words())
    return table
