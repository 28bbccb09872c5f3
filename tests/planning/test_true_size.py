"""Recipes of published experiments build at true size, without weights; each has a twin for a small machine."""

import dataclasses
import json
import math
import re
from importlib import resources
from pathlib import Path

import jax
import pytest

from moe_jax.commands.cli import main
from moe_jax.commands.options import described_model
from moe_jax.models import config_from_json
from moe_jax.planning.model_costs import make_plan, tuned_parameters
from moe_jax.training.program import make_program
from moe_jax.training.recipe import load_recipe
from moe_jax.training.recipe_toml import PACKAGE, recipe_file, shipped_recipes
from tests.support.environment import ROOT
from tests.support.tiers import one_in

RECIPES = ROOT / "train" / "recipes"
# Parameters of the model, LoRA left out, and those that are trained.
EXPECTED = {
    "camelidae_8x7b": (7_813_206_016, 1_234_698_240),
    "camelidae_8x13b": (14_695_224_320, 1_929_707_520),
    "camelidae_8x34b": (37_915_573_248, 4_018_176_000),
    "perft_olmoe": (6_919_161_856 + 8_650_752, 8_650_752),
    "perft_mixtral": (46_702_792_704 + 17_301_504, 17_301_504),
    # DeRS counts its 35.19 M without the universal FFNs, which are trained as well.
    "ders_coder_moe": (1_346_471_936 + 35_193_216, 1_346_471_936 + 35_193_216 + 24 * 3 * 2048 * 5504),
}


@one_in(3)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_experiment_builds(name):
    config = config_from_json(json.loads((RECIPES / "configs" / f"{name}.json").read_bytes()))
    recipe = load_recipe(RECIPES / f"{name}.toml")
    total, trained = EXPECTED[name]
    plan, tuned = make_plan(config), tuned_parameters(config)
    assert (plan.dense_params + plan.formula_added_params, plan.trainable_params) == (total, trained)
    assert tuned is None or tuned.total_params == trained

    program = make_program(recipe, config)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(program.state.params)]
    assert sum(sizes) == trained
    # Two moments in float32 for what is trained, none for what is not.
    moments = [leaf for leaf in jax.tree.leaves(program.state.opt_state) if leaf.ndim]
    assert sum(math.prod(leaf.shape) for leaf in moments) == 2 * trained
    assert {leaf.dtype.name for leaf in moments} == {"float32"}
    # What is frozen is held as it is stored: NF4 codes, or bfloat16.
    kernels = {leaf.dtype.name for leaf in jax.tree.leaves(program.frozen) if leaf.ndim > 1 and leaf.size > 2**22}
    assert kernels <= (set() if tuned is None else {"bfloat16", "uint8"})
    assert ("uint8" in kernels) == name.startswith("camelidae")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_experiment_names_a_twin_of_its_kind(name):
    header = (RECIPES / f"{name}.toml").read_text()
    twin = re.search(r"(\w+_small)\.toml", header)[1]
    small, large = load_recipe(RECIPES / f"{twin}.toml"), load_recipe(RECIPES / f"{name}.toml")
    assert small.schedule.kind == large.schedule.kind and small.partition == large.partition
    assert dataclasses.replace(small.optimizer, learning_rate=large.optimizer.learning_rate) == large.optimizer
    # The command of the twin is that of the experiment with smaller numbers.
    methods = [re.search(r"--method [\w-]+", text)[0] for text in (header, (RECIPES / f"{twin}.toml").read_text())]
    assert methods[0] == methods[1]


def test_recipes_are_installed_with_the_package():
    installed = {path.name for path in (resources.files(PACKAGE) / "configs").iterdir()}
    assert {f"{name}.json" for name in EXPECTED} <= installed
    name = "mixtral_8x7b_v5p_4x4x4"
    assert recipe_file(Path(name)).read_text() == (RECIPES / f"{name}.toml").read_text()
    assert recipe_file(Path(f"{name}.toml")) == recipe_file(Path(name)) and recipe_file(Path("own.toml")) == Path(
        "own.toml"
    )
    assert load_recipe(name) == load_recipe(RECIPES / f"{name}.toml")
    with pytest.raises(FileNotFoundError, match="did you mean 'mixtral_8x7b_v5p_4x4x4'"):
        recipe_file(Path("mixtral_8x7b_v5p_4x4x"))


def test_a_folder_does_not_hide_a_shipped_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "upcycle_small").mkdir()
    assert recipe_file(Path("upcycle_small")).is_file()


@pytest.mark.parametrize("name", ["upcycle_smal", "upcycle-small.toml", "Upcycle_Small", "UPCYCLE_SMALL.toml"])
def test_a_mistyped_recipe_has_a_hint(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--train", name]) == 2
    assert f"did you mean 'upcycle_small{Path(name).suffix}'" in capsys.readouterr().err
    assert main(["plan", "--train", "train/recipes/upcycle_small.toml"]) == 2
    assert "its name, upcycle_small" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in sorted(shipped_recipes()) if not name.endswith("_small")])
def test_a_shipped_recipe_is_planned_by_its_name_before_there_is_a_model(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if name == "recover_router":  # for a model of one's own
        assert described_model(load_recipe(name), Path(name)) == "small"
        return
    config = described_model(load_recipe(name), Path(name))
    assert isinstance(config, Path) and config.is_file()
    if name == "perft_olmoe":
        assert main(["plan", "--train", name, "--platform", "v5e", "--mesh", "fsdp=8"]) == 0
        assert "trainable" in capsys.readouterr().out
