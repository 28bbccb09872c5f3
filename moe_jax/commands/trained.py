"""What `adapt` and `upcycle` say at their end."""

import rich.console

from moe_jax.models import ModelConfig
from moe_jax.peft.report import print_trained
from moe_jax.plan import trained_leaves
from moe_jax.step0 import Step0


def print_default_training(config: ModelConfig) -> None:
    """Prints what of a model training will change if no recipe says otherwise."""
    console = rich.console.Console()
    if not console.is_terminal:  # into a file or a pager nothing is wrapped
        console = rich.console.Console(width=200)
    print_trained(console, config, trained_leaves(config))


def step0_lines(step0: Step0 | None, quantization: Step0 | None) -> list[str]:
    """How far the new model is from its source."""
    if step0 is None:
        return ["step-0 difference: not checked"]
    beside = "the same model with NF4 kernels" if quantization is not None else "the model"
    lines = [f"step-0 difference from {beside}: {step0.difference:.2g} (largest logit {step0.largest:.3g})"]
    if quantization is not None:
        lines.append(f"NF4 changes the logits by up to {quantization.difference:.2g}")
    return lines
