"""Recipes of published stages of models that see: built at true size, and what they train; twins of their kind."""

import dataclasses
import json
import math
import re

import jax
import pytest

from moe_jax.model_io.loading import TOWER, disk_paths
from moe_jax.models import config_from_json
from moe_jax.training.program import make_program
from moe_jax.training.recipe import load_recipe
from tests.support.environment import ROOT

RECIPES = ROOT / "train" / "recipes"
LANGUAGE_MODEL, PROJECTOR, EXPERTS = 1_644_515_328, 6_295_552, 1_245_806_592
FFNS, TOWER_SIZE = 24 * 3 * 2048 * 5632, 303_507_456
# Config, and the parameters that are trained.
EXPECTED = {
    "moe_llava_stage1": ("llava_stablelm", PROJECTOR),
    "moe_llava_stage2": ("moe_llava_stage2", LANGUAGE_MODEL + PROJECTOR),
    "moe_llava_stage3": ("moe_llava_stablelm", FFNS + EXPERTS + PROJECTOR),
    # Routers are frozen; the universal FFNs are copies of the FFNs of 12 layers.
    "med_moe_stage3": ("med_moe_stablelm", FFNS + EXPERTS - 12 * 4 * 2048 + FFNS // 2 + PROJECTOR),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_stage_builds_and_trains_what_it_says(name):
    file, trained = EXPECTED[name]
    config = config_from_json(json.loads((RECIPES / "configs" / f"{file}.json").read_bytes()))
    recipe = load_recipe(RECIPES / f"{name}.toml")
    keeps = recipe.data.feature_cache is not None
    program = make_program(recipe, config, jax.devices()[:1], pictures=recipe.data.max_pictures or 0, features=keeps)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.state.params)) == trained
    assert program.tower_use == ("kept" if keeps else "frozen") and not any(
        path.startswith(TOWER) for path in program.trainable
    )
    paths = {leaf for path in program.trainable for leaf in disk_paths(config, path)}
    routers = {path for path in paths if "/router/" in path}
    assert bool(routers) == (name == "moe_llava_stage3")
    if "stage3" in name:
        moe = config.moe(0)
        assert config.moe_layers == tuple(range(0, 24, 2)) and moe.balance_choices == "first"
        assert moe.router_bias == (moe.universal == "med") == (name == "med_moe_stage3")
        # Those of dense layers too.
        assert {"layers/1/mlp/up/kernel", "vision/projector/2/bias"} <= paths
        assert not {path for path in paths if "attention" in path or "norm" in path or path.startswith("embed")}


def test_a_frozen_projector_is_one_line():
    recipe = load_recipe(RECIPES / "moe_llava_stage3.toml", ['partition.freeze=["vision/projector/.*"]'])
    config = config_from_json(json.loads((RECIPES / "configs" / "moe_llava_stablelm.json").read_bytes()))
    program = make_program(recipe, config, jax.devices()[:1])
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(program.state.params)]
    assert sum(sizes) == EXPECTED["moe_llava_stage3"][1] - PROJECTOR


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_stage_names_a_twin_of_its_kind(name):
    header = (RECIPES / f"{name}.toml").read_text()
    assert f"{name}_small.toml" in header
    small, large = load_recipe(RECIPES / f"{name}_small.toml"), load_recipe(RECIPES / f"{name}.toml")
    assert small.schedule.kind == large.schedule.kind and small.partition == large.partition
    assert dataclasses.replace(small.optimizer, learning_rate=large.optimizer.learning_rate) == large.optimizer
    same = ("packing", "chat_template", "image_aspect", "max_pictures")
    assert [getattr(small.data, key) for key in same] == [getattr(large.data, key) for key in same]
    # The command of the twin is that of the experiment, but for names.
    commands = [
        re.findall(r"upcycle \S+ \S+ (.*(?:\\\n.*)?)", text)
        for text in (header, (RECIPES / f"{name}_small.toml").read_text())
    ]
    options = [[re.findall(r"--[a-z-]+", one) for one in found] for found in commands]
    assert options[0] == options[1] and bool(options[0]) == ("stage3" in name)


def test_published_numbers():
    for name, (rate, rows, epochs) in {
        "moe_llava_stage1": (1e-3, 256, 1),
        "moe_llava_stage2": (2e-5, 128, 1),
        "moe_llava_stage3": (2e-5, 128, 1),
        "med_moe_stage3": (2e-5, 64, 9),
    }.items():
        recipe = load_recipe(RECIPES / f"{name}.toml")
        optimizer, schedule = recipe.optimizer, recipe.schedule
        assert (optimizer.learning_rate, recipe.train.batch_size, recipe.data.epochs) == (rate, rows, epochs)
        assert (optimizer.b1, optimizer.b2, optimizer.weight_decay, optimizer.clip_norm) == (0.9, 0.999, 0.0, 1.0)
        assert (schedule.kind, schedule.final_ratio) == ("cosine", 0.0)
        assert schedule.warmup_steps == math.ceil(0.03 * recipe.train.steps)
