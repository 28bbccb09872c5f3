"""`moe-jax adapt MODEL OUT`: fresh adapters beside a frozen model.

The command compares the logits of both models on a probe batch, fails if they differ, and records the difference in
lineage.json. `plan` takes the same options, except for MODEL and OUT.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from moe_jax.commands import optional

if TYPE_CHECKING:
    from moe_jax.peft.adapt import Adapted
    from moe_jax.peft.options import AdaptOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptFlags:
    """Which adapters are put beside the model. An option that was not given is None."""

    method: Annotated[
        Literal["perft-r", "perft-e", "perft-d", "perft-s", "lora"] | None,
        tyro.conf.arg(metavar="perft-r|perft-e|perft-d|perft-s|lora", help_behavior_hint="(required)"),
    ] = None
    """PERFT puts adapters beside every MoE: M adapters with their own router (perft-r), one per expert, weighted by the
    MoE's router (perft-e), M that see every token (perft-d), or one that does (perft-s). lora: LoRA on --targets."""
    adapter: Annotated[str | None, tyro.conf.arg(metavar="lora:R|parallel:R", help_behavior_hint="(required)")] = None
    """The form of an adapter: two matrices of rank R, without (lora) or with SiLU in between (parallel, PERFT only)."""
    experts: Annotated[int | None, optional("M")] = None
    """perft-r and perft-d, which require it: the number of adapters per MoE."""
    top_k: Annotated[int | None, optional("K")] = None
    """perft-r, which requires it: the number of adapters that a token is routed to."""
    targets: Annotated[str | None, optional("q,v,...")] = None
    """lora, which requires it: which kernels get LoRA, out of q, k, v, o (of attention), gate, up, down (of FFNs and
    experts) and router; in every layer that has them."""
    scale: Annotated[float | None, optional("FLOAT", "2 of lora:R, 1 of parallel:R")] = None
    """The factor by which the adapters' outputs are multiplied."""
    alpha: Annotated[float | None, optional("FLOAT", "2R")] = None
    """lora:R: sets the scale to ALPHA/R; instead of --scale."""
    dropout: Annotated[float | None, optional("FLOAT", "0.05; of LoRA on full experts 0")] = None
    """Dropout rate on the adapters' inputs in training."""
    base: Annotated[Literal["stored", "nf4"] | None, optional("stored|nf4", "stored")] = None
    """How the frozen base is kept: as stored, or with the kernels of attention, FFNs and experts quantised to NF4,
    4-bit codes of normally distributed weights."""
    balance_coef: Annotated[float | None, optional("FLOAT", "0.01")] = None
    """perft-r: coefficient of the loss that makes the adapters' router use them alike."""
    z_coef: Annotated[float | None, optional("FLOAT", "0")] = None
    """perft-r: coefficient of the z-loss of the adapters' router, which keeps its logits small."""
    seed: Annotated[int | None, optional("INT", "0")] = None
    """Seed of the initial adapters and routers."""
    no_step0_check: bool = False
    """Skips the comparison with the logits of the original model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(AdaptFlags):
    """Adds small trainable adapters to a model that stays frozen: PERFT beside its MoEs, or LoRA on its kernels.

    The output holds only the adapters and refers to the model, which has to stay where it is. Several adapter
    directories can share one model.
    """

    in_buckets: ClassVar[tuple[str, ...]] = ("model", "out", "text")

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory or a Hugging Face directory."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the adapter directory appears; must not exist."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: a built-in text)")] = None
    """With --base nf4: a text on which the loss before and after quantising, and the KL divergence, are shown; its
    first 512 tokens."""
    allow_nonfinite: bool = False
    """Goes on where weights are NaN or infinite, instead of refusing."""


GROUPS = {
    "the adapters": (
        "method",
        "adapter",
        "experts",
        "top_k",
        "targets",
        "scale",
        "alpha",
    ),
    "training, kept in the adapter's config": (
        "dropout",
        "balance_coef",
        "z_coef",
    ),
}
EXAMPLES = """
# LoRA of rank 16 on attention's queries and values and on the routers
moe-jax adapt moe-dir lora-dir --method lora --adapter lora:16 --targets q,v,router
# eight small experts beside every MoE, two for a token; the base in 4 bits
moe-jax adapt moe-dir perft-dir --method perft-r --adapter lora:16 --experts 8 --top-k 2 --base nf4
"""


def run(options: Options) -> None:
    """Writes the adapter directory and prints which parameters will be trained.

    Raises:
      FileNotFoundError, InputError: bad input; see `moe_jax.peft.adapt`.
    """
    from moe_jax.api.built_in_text import probe_text
    from moe_jax.api.open_source import open_source
    from moe_jax.conversion.peft_targets import problems_of_peft
    from moe_jax.core.terminal import console_for_tables, progress_bars
    from moe_jax.files.staging import check_target
    from moe_jax.peft.adapt import adapt
    from moe_jax.peft.options import adapted_config
    from moe_jax.peft.trained_table import print_trained
    from moe_jax.planning.model_costs import trained_leaves

    chosen, seed = adapt_options(options), options.seed or 0
    # Check this before opening the source: fingerprinting a large model takes a while.
    check_target(options.out, buckets=True)
    check = not options.no_step0_check
    described = {**dataclasses.asdict(chosen), "seed": seed, "step0_check": check}
    source = open_source(options.model)
    text = probe_text(source, adapted_config(source.config, chosen), options.text, check=check)
    with progress_bars() as progress:
        result = adapt(
            source,
            options.out,
            chosen,
            seed=seed,
            check=check,
            text=text,
            allow_nonfinite=options.allow_nonfinite,
            described=described,
            progress=progress,
        )
    print_trained(console_for_tables(), result.config, trained_leaves(result.config))
    for line in _step0_lines(result):
        print(line)
    if chosen.method == "lora" and (problems := problems_of_peft(result.config)):
        print(f"note: export --format peft will not take it ({problems[0]}); moe-jax merge will")
    print(f"wrote {options.out}")


def adapt_options(given: AdaptFlags) -> "AdaptOptions":
    """The options of `moe_jax.peft.adapt` that the user chose.

    Raises:
      InputError: if --method or --adapter was not given.
    """
    from moe_jax.peft.options import chosen_options

    flags = {field.name: getattr(given, field.name) for field in dataclasses.fields(AdaptFlags)}
    return chosen_options(**{name: value for name, value in flags.items() if name not in ("seed", "no_step0_check")})


def _step0_lines(result: "Adapted") -> list[str]:
    """Lines that say by how much the logits of the new model differ from those of its source."""
    step0, quantization, on_text = result.step0, result.quantization, result.on_text
    if step0 is None:
        return ["step-0 difference: not checked"]
    beside = "the same model with NF4 kernels" if quantization is not None else "the model"
    lines = [f"step-0 difference from {beside}: {step0.difference:.2g} (largest logit {step0.largest:.3g})"]
    if quantization is not None:
        lines.append(f"NF4 changes the logits by up to {quantization.difference:.2g}")
    if on_text is not None:
        lines.append(f"NF4 on {on_text.text}: {on_text.in_words()}")
    return lines
