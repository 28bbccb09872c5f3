"""The recipes that come with the library."""

from importlib import resources
from pathlib import Path

PACKAGE = "moe_jax.recipes"
"""In a checkout this is the folder `train/recipes`."""


def shipped_recipes() -> dict[str, Path]:
    """Returns the files of the recipes by their names, such as `upcycle_small`."""
    files = (Path(str(file)) for file in resources.files(PACKAGE).iterdir())
    return {file.stem: file for file in sorted(files) if file.suffix == ".toml"}


def recipe_file(named: Path) -> Path:
    """Returns the file of a recipe: the path itself, or that of the shipped recipe of this name.

    A file or address of this name comes first.
    """
    if named.suffix or len(named.parts) != 1 or named.exists():
        return named
    return shipped_recipes().get(named.name, named)
