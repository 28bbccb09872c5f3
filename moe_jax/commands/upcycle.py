"""`moe-jax upcycle SRC DST`: a dense model becomes a Mixture-of-Experts.

The command compares the logits of both models on a probe batch, fails if they differ, and records the difference in
lineage.json. Its options, but for SRC and DST, are options of `plan` too.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from moe_jax.experts.config import BankConfig
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
        from moe_jax.errors import InputError, raise_if_any
        from moe_jax.upcycle import PESC, UpcycleOptions, parse_delta, parse_rest

        raise_if_any(_misplaced(self), f"--method {self.method}" if self.method else "upcycling")
        if self.gate is not None and self.universal not in (None, "none"):
            raise InputError(f"--gate does not go with --universal {self.universal}, which weights the experts itself")
        given = {
            "num_experts": self.experts,
            "top_k": self.top_k,
            "every": self.every,
            "layers": self.layers,
            "gate": self.gate,
            "balance_coef": self.balance_coef,
            "z_coef": self.z_coef,
            "cv_coef": self.cv_coef,
            "universal": self.universal,
        }
        if self.method == "pesc":
            rest = PESC.rest if self.rest is None else parse_rest(self.rest)
            options = dataclasses.replace(PESC, bank=_adapter_bank(PESC.bank, self.adapter, self.scale), rest=rest)
        else:
            bank = parse_delta(self.delta or "full", freeze_base=self.freeze_base)
            options = UpcycleOptions(bank=bank, extended=self.extended)
        return dataclasses.replace(options, **{name: value for name, value in given.items() if value is not None})

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


def _misplaced(given: UpcycleFlags) -> list[str]:
    """Options that the method does not have, and those that it lacks."""
    if given.method == "pesc":
        absent = {"delta": given.delta, "freeze-base": given.freeze_base, "universal": given.universal}
        absent |= {"extended": given.extended, "gate": given.gate}
        given_here = [name for name, value in absent.items() if value not in (None, False, "none")]
        return [f"--{name} does not go with adapter experts" for name in given_here]
    absent = {"adapter": given.adapter, "scale": given.scale, "rest": given.rest}
    problems = [f"--{name} goes with --method pesc only" for name, value in absent.items() if value is not None]
    if given.method == "vanilla" and given.delta not in (None, "full"):
        problems.append(f"its experts are copies, and --delta {given.delta} is another kind; use --method ders")
    if given.method == "ders" and given.delta in (None, "full"):
        problems.append("--delta is missing: low-rank:R or sparse:RATE")
    return problems


def _adapter_bank(bank: "BankConfig", width: str | None, scale: float | None) -> "BankConfig":
    """PESC's bank with another adapter."""
    from moe_jax.errors import InputError

    if width is not None and not width.isdigit():
        raise InputError(f"--adapter {width!r}: of pesc it is the width of the adapters, a whole number such as 512")
    changed = {"rank": None if width is None else int(width), "scale": scale}
    adapter = dataclasses.replace(bank.adapter, **{key: value for key, value in changed.items() if value is not None})
    return dataclasses.replace(bank, adapter=adapter)
