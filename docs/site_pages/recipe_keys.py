"""The page of the keys of recipes: what `moe-jax train --keys` prints, a table for every section."""

import itertools

from moe_jax.training.recipe import Recipe
from moe_jax.training.recipe_toml import RecipeKey, recipe_keys
from site_pages.commands import in_table, plain

PAGE = "reference/recipe-keys.md"
_HEAD = """\
# Keys of recipes

A recipe is a TOML file that says what is trained, on which data, and how long. These are all keys that it may have;
`moe-jax train --keys` prints them too, and `moe-jax train --keys optimizer` those that have this word in their name.
On the command line `--set optimizer.learning_rate=1e-4` sets one.
"""


def pages() -> dict[str, str]:
    """Returns the page by its file."""
    sections = itertools.groupby(recipe_keys(Recipe), lambda key: key.name.rpartition(".")[0])
    return {PAGE: "\n".join([_HEAD, *(_section(name, list(keys)) for name, keys in sections)])}


def _section(name: str, keys: list[RecipeKey]) -> str:
    table = f"[[{name.removesuffix('[]')}]]" if name.endswith("[]") else f"[{name}]"
    title = f"## `{table}`" if name else "## Before all sections"
    rows = "".join(
        f"| {' | '.join(map(in_table, (_name(key), plain(key.kind), _default(key), plain(key.text))))} |\n"
        for key in keys
    )
    return f"{title}\n\n| key | values | default | meaning |\n|---|---|---|---|\n{rows}"


def _name(key: RecipeKey) -> str:
    return f"`{key.name.rpartition('.')[2]}`"


def _default(key: RecipeKey) -> str:
    if key.is_required:
        return "required"
    return f"`{key.default}`" if key.default else ""
