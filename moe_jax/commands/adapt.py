"""`moe-jax adapt MODEL OUT`: fresh adapters beside a frozen model; `plan` takes the same options."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from moe_jax.commands.options import command_options, given_to
from moe_jax.peft.spec import AdaptSpec

if TYPE_CHECKING:
    from moe_jax.peft.adapt import Adapted


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Adds small trainable adapters to a model that stays frozen: PERFT beside its MoEs, or LoRA on its kernels.

    The output holds only the adapters and refers to the model, which has to stay where it is. Several adapter
    directories can share one model.
    """

    models: ClassVar[tuple[str, ...]] = ("model",)
    texts: ClassVar[tuple[str, ...]] = ("text",)
    made: ClassVar[tuple[str, ...]] = ("out",)

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory or a Hugging Face directory."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the adapter directory appears; must not exist."""


Options = command_options(_Command, AdaptSpec)
GROUPS = {
    "the adapters": ("method", "adapter", "experts", "top_k", "targets", "scale", "alpha"),
    "training, kept in the adapter's config": ("dropout", "balance_coef", "z_coef"),
}
EXAMPLES = """
# LoRA of rank 16 on attention's queries and values and on the routers
moe-jax adapt moe-dir lora-dir --method lora --adapter lora:16 --targets q,v,router
# eight small experts beside every MoE, two for a token; the base in 4 bits
moe-jax adapt moe-dir perft-dir --method perft-r --adapter lora:16 --experts 8 --top-k 2 --base nf4
"""


def run(options: _Command) -> None:
    """Writes the adapter directory and prints which parameters will be trained."""
    import moe_jax
    from moe_jax.conversion.to_peft import problems_of_peft
    from moe_jax.core.terminal import console_for_tables
    from moe_jax.peft.trained import print_trained
    from moe_jax.planning.model_costs import trained_leaves

    spec = given_to(AdaptSpec, options)
    made = moe_jax.adapt(options.model, options.out, spec).report
    print_trained(console_for_tables(), made.config, trained_leaves(made.config))
    for line in _step0_lines(made):
        print(line)
    if spec.method == "lora" and (problems := problems_of_peft(made.config)):
        print(f"note: export --format peft will not take it ({problems[0]}); moe-jax merge will")
    print(f"wrote {options.out}")


def _step0_lines(result: "Adapted") -> list[str]:
    """Returns lines that say by how much the logits of the new model differ from those of its source."""
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
