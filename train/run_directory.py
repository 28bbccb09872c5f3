"""The run directory: what a run leaves behind, and what it needs to go on.

    recipe.toml      the recipe as resolved, overrides included
    checkpoints/     the last few training checkpoints
    metrics.jsonl    one line per step
    tensorboard/     the same as events
    model/           a model directory, at the end
"""

from pathlib import Path

from moe_jax.errors import InputError
from moe_jax.staging import sync, write_durably
from moe_jax.train import strict
from moe_jax.train.recipe import Recipe, check_continues, load_recipe

RECIPE = "recipe.toml"


def check_run_directory(recipe: Recipe, *, resume: bool) -> bool:
    """Returns whether there is a run to continue; writes nothing.

    Raises:
      InputError: if `run_dir` exists and is not to be continued, is not a run, or was made by another recipe.
    """
    run_dir = Path(recipe.run_dir)
    if not run_dir.exists() and not run_dir.is_symlink():
        return False
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        return False
    if not resume:
        raise InputError(f"{run_dir} already exists; continue it with --resume, or choose another run_dir")
    if not (run_dir / RECIPE).is_file():
        raise InputError(f"{run_dir} is not a training run: it has no {RECIPE}; choose another run_dir")
    check_continues(load_recipe(run_dir / RECIPE), recipe)
    return True


def write_recipe(recipe: Recipe) -> None:
    """Creates the run directory, if need be, and puts the recipe into it as resolved."""
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    beside = run_dir / f".{RECIPE}.new"
    write_durably(beside, strict.to_toml(recipe).encode())
    beside.replace(run_dir / RECIPE)
    sync(run_dir)
