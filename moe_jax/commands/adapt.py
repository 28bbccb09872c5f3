"""`moe-jax adapt MODEL OUT`: fresh adapters beside a frozen model.

The command compares the logits of both models on a probe batch, fails if they differ, and records the difference in
lineage.json. Its options, but for MODEL and OUT, are options of `plan` too.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from moe_jax.peft.options import AdaptOptions
    from moe_jax.step0 import Step0


def _arg(default: str, metavar: str) -> object:
    """An option that shows its default, which the method has; None here means that it was not given."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptFlags:
    """What is to stand beside the model; None where the user said nothing."""

    method: Annotated[
        Literal["perft-r", "perft-e", "perft-d", "perft-s", "lora"] | None,
        tyro.conf.arg(metavar="perft-r|perft-e|perft-d|perft-s|lora", help_behavior_hint="(required)"),
    ] = None
    """PERFT puts adapters beside every MoE: M with a router of their own (perft-r), one for each expert and with the
    MoE's router (perft-e), M that see every token (perft-d), or one (perft-s). lora: products beside --targets."""
    adapter: Annotated[str | None, tyro.conf.arg(metavar="lora:R|parallel:R", help_behavior_hint="(required)")] = None
    """What an adapter is: a product of rank R, or one with SiLU between its factors (PERFT only)."""
    experts: Annotated[int | None, _arg("", "M")] = None
    """perft-r and perft-d: how many adapters there are."""
    top_k: Annotated[int | None, _arg("", "K")] = None
    """perft-r: adapters that a token goes to."""
    targets: Annotated[str | None, _arg("", "q,v,...")] = None
    """lora: the kernels, out of q, k, v, o, gate, up, down and router, in all layers that have them."""
    scale: Annotated[float | None, _arg("2 of lora:R, 1 of parallel:R", "FLOAT")] = None
    """What the adapters' outputs are multiplied by."""
    alpha: Annotated[float | None, _arg("2R", "FLOAT")] = None
    """lora:R: instead of --scale, which is ALPHA/R."""
    dropout: Annotated[float | None, _arg("0.05; of LoRA on full experts 0", "FLOAT")] = None
    """Share of the adapters' inputs set to zero in training."""
    base: Annotated[Literal["stored", "nf4"] | None, _arg("stored", "stored|nf4")] = None
    """How the frozen base is held: as it is stored, or with the kernels of attention, FFNs and experts as NF4 codes."""
    balance_coef: Annotated[float | None, _arg("0.01", "FLOAT")] = None
    """perft-r: coefficient of the load-balancing loss of the adapters' router."""
    z_coef: Annotated[float | None, _arg("0", "FLOAT")] = None
    """perft-r: coefficient of the z-loss of the adapters' router."""
    seed: Annotated[int | None, _arg("0", "INT")] = None
    """Of the adapters and their routers."""
    no_step0_check: bool = False
    """Leaves out the comparison with the untouched model's logits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(AdaptFlags):
    """Puts adapters beside a model, to be trained while the model is frozen: PERFT beside the MoEs, or LoRA.

    What is written holds the adapters alone and refers to the model, which has to stay where it is. Several can stand
    on one model.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory or a Hugging Face directory."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the adapter directory appears; must not exist."""


def run(options: Options) -> None:
    """Adapts, and prints what will be trained.

    Raises:
      FileNotFoundError, InputError: bad input; see `moe_jax.peft.adapt`.
    """
    from moe_jax.open_source import open_source
    from moe_jax.peft.adapt import adapt
    from moe_jax.peft.trained_table import print_trained
    from moe_jax.plan import trained_leaves
    from moe_jax.staging import refuse_existing
    from moe_jax.terminal import console_for_tables, progress_bars

    chosen, seed = adapt_options(options), options.seed or 0
    # A source is fingerprinted when it is opened, which for a large one takes a while.
    refuse_existing(options.out)
    described = {**dataclasses.asdict(chosen), "seed": seed, "step0_check": not options.no_step0_check}
    with progress_bars() as progress:
        result = adapt(
            open_source(options.model),
            options.out,
            chosen,
            seed=seed,
            check=not options.no_step0_check,
            described=described,
            progress=progress,
        )
    print_trained(console_for_tables(), result.config, trained_leaves(result.config))
    for line in _step0_lines(result.step0, result.quantization):
        print(line)
    print(f"wrote {options.out}")


def adapt_options(given: AdaptFlags) -> "AdaptOptions":
    """What to do.

    Raises:
      InputError: if there is no method or adapter.
    """
    from moe_jax.peft.options import chosen_options

    flags = {field.name: getattr(given, field.name) for field in dataclasses.fields(AdaptFlags)}
    return chosen_options(**{name: value for name, value in flags.items() if name not in ("seed", "no_step0_check")})


def _step0_lines(step0: "Step0 | None", quantization: "Step0 | None") -> list[str]:
    """How far the new model is from its source."""
    if step0 is None:
        return ["step-0 difference: not checked"]
    beside = "the same model with NF4 kernels" if quantization is not None else "the model"
    lines = [f"step-0 difference from {beside}: {step0.difference:.2g} (largest logit {step0.largest:.3g})"]
    if quantization is not None:
        lines.append(f"NF4 changes the logits by up to {quantization.difference:.2g}")
    return lines
