"""`moe-jax train RECIPE.toml`: trains a model, or compiles the step for a TPU pod without one."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from moe_jax.commands.environment import imported
from moe_jax.commands.options import can_be_read_again, check_model, check_recipe, described_model
from moe_jax.core.errors import InputError

if TYPE_CHECKING:
    from moe_jax.training.recipe import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Trains a model as a recipe says, a TOML file; or compiles its step for a TPU pod or GPUs without any.

    Paths in the recipe are relative to the current directory. Ctrl-C and SIGTERM save a checkpoint before the end.
    """

    recipe: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RECIPE.toml")] = None
    """The recipe: a file, or the name of one that comes with the library, such as upcycle_small. --keys explains its
    keys."""
    set: Annotated[tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Overrides keys of the recipe, as in --set train.steps=100 optimizer.learning_rate=1e-4."""
    keys: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[PATTERN ...]", help_behavior_hint="")] = None
    """Trains nothing, and prints the keys of recipes with their values, defaults and meanings: all, or those that
    match, as in --keys optimizer 'data.*'."""
    resume: bool = False
    """Continues the run in the run directory after its last checkpoint; starts it where there is none."""
    restart: Annotated[str | None, tyro.conf.arg(metavar="RUN@STEP")] = None
    """Begins a new run with a checkpoint of another one, which stays as it is: after a divergence, or to try other
    settings. The recipe names another run_dir, where there may be a run that had saved no checkpoint; optimizer and
    schedule may differ, and lineage.json says how. With --resume, a run that was begun so goes on."""
    skip_batches: int = 0
    """With --restart: leaves out this many batches after the checkpoint."""
    compile_only: bool = False
    """Compiles the training step for --topology and prints bytes per chip and collectives; needs no weights."""
    topology: Annotated[str | None, tyro.conf.arg(metavar="KIND:SHAPE")] = None
    """The accelerator to compile for, such as v5e:4x4 or v5p:2x2x4, or h100:2x8: hosts and GPUs on each.
    --compile-only requires it."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --compile-only: a config.json (of this library or Hugging Face's) instead of that of the recipe's model."""
    pictures: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """With --compile-only: pictures in every row of a model that sees; by default data.max_pictures of the recipe. With
    data.feature_cache they come as features of the tower, which then is not run."""
    json: bool = False
    """With --compile-only: prints JSON and nothing else."""

    def check(self) -> None:
        """Raises `InputError` for options that do not go together or are out of range."""
        if self.keys is not None:
            return
        if self.compile_only != (self.topology is not None):
            raise InputError("--compile-only and --topology go together, as in --compile-only --topology v5e:4x4")
        if not self.compile_only and (self.json or self.config or self.pictures is not None):
            raise InputError("--json, --config and --pictures go with --compile-only")
        if self.pictures is not None and self.pictures < 0:
            raise InputError(f"--pictures {self.pictures}: expected a number from 0")
        if self.skip_batches < 0 or (self.skip_batches and self.restart is None):
            raise InputError(f"--skip-batches {self.skip_batches}: expected a number from 0, and --restart with it")
        if self.recipe is None:
            raise InputError("missing: RECIPE.toml; see moe-jax train --help, and --keys for what a recipe holds")

    def check_places(self) -> None:
        """Raises an error if the recipe, or what it names and the command reads, is not there or cannot be read."""
        if self.recipe is None or not can_be_read_again(self.recipe):
            return
        if self.restart is not None and "@" in self.restart:
            check_model(self.restart)
        recipe = self.load()
        if not self.compile_only:
            check_recipe(recipe)
            return
        check_model(self.config or described_model(recipe, self.recipe))
        if recipe.distill is not None:
            check_model(recipe.distill.teacher)

    def load(self) -> "Recipe":
        """Returns the recipe with what is set besides; raises `InputError` if it cannot be read."""
        from moe_jax.training.recipe import load_recipe

        assert self.recipe is not None
        return load_recipe(self.recipe, self.overrides)

    @property
    def overrides(self) -> list[str]:
        """The keys that are set besides the recipe, as they are given."""
        return [override for group in self.set for override in group]


GROUPS = {
    "recipe": ("set", "keys"),
    "runs that were begun": ("resume", "restart", "skip_batches"),
    "compiling for machines that are not there": ("compile_only", "topology", "config", "pictures", "json"),
}
EXAMPLES = """
moe-jax train recipe.toml --set model.path=moe train.steps=1000
# after an interruption; begins where there is nothing to continue
moe-jax train recipe.toml --resume
# does the step fit 16 chips? needs no TPU
moe-jax train recipe.toml --compile-only --topology v5e:4x4
# what a recipe can say about the optimizer
moe-jax train --keys optimizer
"""


def run(options: Options) -> int:
    """Runs the recipe; returns the exit code, 128 + N after signal N, which is no success: the run is to go on."""
    if options.keys is not None:
        _print_keys(options.keys)
        return 0
    from moe_jax.api.open_source import read_config

    assert options.recipe is not None
    if not options.compile_only:
        from moe_jax.distributed.processes import join_processes

        join_processes()  # before anything is read: an error in one process is heard of in all
    recipe = options.load()
    if options.compile_only:
        from moe_jax.planning.planned_devices import prepare_environment

        prepare_environment()
        from moe_jax.planning.compile_only import check_fits, compile_only, print_report

        file = options.config or described_model(recipe, options.recipe)
        assert file is not None and options.topology is not None
        config = read_config(file)
        teacher = None if recipe.distill is None else read_config(recipe.distill.teacher)
        pictures = recipe.data.max_pictures or 0 if options.pictures is None else options.pictures
        report = compile_only(recipe, config, options.topology, pictures=pictures, teacher=teacher)
        print_report(report, as_json=options.json)
        check_fits(report)
        return 0

    from moe_jax.api.train import run_recipe
    from moe_jax.core.errors import SIGNALLED
    from moe_jax.training.loop import Stopped

    command = [
        "moe-jax",
        *(word for name in imported for word in ("--import", name)),
        "train",
        str(options.recipe),
        *(["--set", *options.overrides] if options.overrides else []),
        "--resume",
    ]
    try:
        run_recipe(
            recipe,
            resume=options.resume,
            restart=options.restart,
            skip_batches=options.skip_batches,
            continue_command=shlex.join(command),
        )
    except Stopped as stopped:
        return SIGNALLED + stopped.signal
    return 0


def _print_keys(patterns: Sequence[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from moe_jax.core.terminal import console_for_tables
    from moe_jax.training.recipe import Recipe
    from moe_jax.training.recipe_toml import recipe_keys

    table = Table("key", "values", "default", "meaning")
    for key in recipe_keys(Recipe, patterns):
        default = "(required)" if key.is_required else key.default or ""
        table.add_row(*map(escape, (key.name, key.kind, default, key.text)))
    console_for_tables().print(table)
