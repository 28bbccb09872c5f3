"""`moe-jax adapt MODEL OUT`: fresh adapters beside a frozen model.

The command compares the logits of both models on a probe batch, fails if they differ, and records the difference in
lineage.json.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from moe_jax.commands.adapting import Adapting, adapt_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Adapting):
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
    from moe_jax.commands.progress import progress_bars
    from moe_jax.commands.trained import print_default_training, step0_lines
    from moe_jax.open_source import open_source
    from moe_jax.peft.adapt import adapt
    from moe_jax.staging import refuse_existing

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
    print_default_training(result.config)
    for line in step0_lines(result.step0, result.quantization):
        print(line)
    print(f"wrote {options.out}")
