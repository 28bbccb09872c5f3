"""Layers that predict tokens after the next, in plans of runs that train them, and of runs that do not."""

import dataclasses
import math

import pytest

from moe_jax.model_io.loading import FURTHER, leaf_specs
from moe_jax.planning.planned_training import PlannedTraining, planned_training
from moe_jax.training.flops import batch_flops, train_flops_per_token
from moe_jax.training.recipe import MTPSection, Recipe, TrainSection
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of

DEPTH = 2
CONFIG = dataclasses.replace(config_of(moe(balance_coef=0.0), moe(balance_coef=0.0)), further_layers=DEPTH)
SIZES = {path: math.prod(spec.shape) for path, spec in leaf_specs(CONFIG).items() if path.startswith(FURTHER)}


def with_remat(remat: str, **sections) -> Recipe:
    recipe = recipe_of(**sections)
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, remat=remat))


def items(plan: PlannedTraining) -> dict[str, int]:
    return {item.name: item.bytes for item in plan.items}


def test_their_parameters_state_and_activations_are_counted():
    plans = {
        depth: planned_training(with_remat("full", mtp=mtp), CONFIG, "v5e:1x1", compiles=False)
        for depth, mtp in ((0, None), (1, MTPSection(depth=1)), (2, MTPSection()))
    }
    without, one, both = (items(plans[depth]) for depth in range(3))
    first = sum(size for path, size in SIZES.items() if path.startswith(f"{FURTHER}0/"))
    assert sum(SIZES.values()) == 2 * first
    for name, each in (("parameters, trained", 4), ("optimizer", 8), ("gradients", 4)):
        assert one[name] - without[name] == each * first and both[name] - without[name] == 2 * each * first
    # They stay in memory, frozen, where they are not trained.
    assert without["parameters, frozen"] == 4 * 2 * first and "parameters, frozen" not in both
    flops = [plans[depth].model_flops or 0 for depth in range(3)]
    assert flops[2] - flops[1] == pytest.approx(flops[1] - flops[0]) and flops[1] > flops[0]


def test_both_inputs_of_such_a_layer_are_kept():
    def more(rows: int) -> int:
        """Bytes of activations that the first layer adds; those that do not depend on the batch are among them."""
        train = TrainSection(steps=1, batch_size=rows)
        recipes = (with_remat("full", mtp=mtp, train=train) for mtp in (MTPSection(depth=1), None))
        one, none = (planned_training(recipe, CONFIG, "v5e:1x1", compiles=False) for recipe in recipes)
        return items(one)["activations"] - items(none)["activations"]

    tokens = 8 * recipe_of().data.seq_len
    assert more(16) - more(8) == pytest.approx(2 * 4 * tokens * CONFIG.d_model, abs=4)


def test_their_operations_are_those_of_a_layer_a_joint_and_a_head():
    recipe = recipe_of(mtp=MTPSection())
    tokens, seq_len = recipe.train.batch_size * recipe.data.seq_len, recipe.data.seq_len
    head, joint = 6 * CONFIG.d_model * CONFIG.num_outputs, 6 * 2 * CONFIG.d_model**2
    layer = (train_flops_per_token(CONFIG, seq_len) - head) / CONFIG.num_layers
    more = batch_flops(recipe, CONFIG) - batch_flops(recipe_of(), CONFIG)
    assert more == pytest.approx(tokens * DEPTH * (layer + joint + head))


@long
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_what_they_keep_is_traced(remat):
    kept = []
    for mtp in (None, MTPSection(depth=1), MTPSection()):
        plan = planned_training(with_remat(remat, mtp=mtp), CONFIG, "v5e:1x1", compiles=False)
        kept.append(items(plan)["activations"])
    assert kept[0] < kept[1] < kept[2]
    assert kept[2] - kept[1] == pytest.approx(kept[1] - kept[0], rel=0.2)
