"""`moe-jax train --keys`: every key with its default, as the recipe reads it, and what it means."""

import pytest

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import parse_toml
from moe_jax.training.recipe import ModelSection, Recipe
from moe_jax.training.recipe_toml import flatten, recipe_keys


def test_every_key_says_what_it_means():
    keys = recipe_keys(Recipe)
    assert len(keys) > 50 and [key.name for key in keys[:2]] == ["run_dir", "seed"]
    assert not [key.name for key in keys if not key.text or not key.kind or key.kind == "table"]


def test_defaults_are_those_of_a_recipe_that_gives_none():
    flat = flatten(Recipe(run_dir="run", model=ModelSection(path="x")))
    keys = {key.name: key for key in recipe_keys(Recipe)}
    compared = [name for name in flat if name in keys and not keys[name].is_required and name != "model.path"]
    assert len(compared) > 40
    for name in compared:
        default = keys[name].default
        value = None if default is None else parse_toml(f"value = {default}", where="")["value"]
        assert value == (list(flat[name]) if isinstance(flat[name], tuple) else flat[name]), name


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [(("keep",), ["checkpoint.keep"]), (("train.s*", "seed"), ["seed", "train.steps"]), (("sources[].w",), None)],
)
def test_patterns_choose(patterns, expected):
    assert [key.name for key in recipe_keys(Recipe, patterns)] == (expected or ["data.sources[].weight"])


def test_a_pattern_of_nothing_is_an_error():
    with pytest.raises(InputError, match=r"'optimiser' \(did you mean 'optimizer"):
        recipe_keys(Recipe, ("optimiser",))


def test_the_command_prints_them_without_a_recipe(capsys):
    assert cli.main(["train", "--keys", "schedule"]) == 0
    out = capsys.readouterr().out
    assert "schedule.warmup_steps" in out and "steps of the warm-up" in out and "learning_rate" not in out
    assert cli.main(["train"]) == 2
    assert "missing: RECIPE.toml" in capsys.readouterr().err
