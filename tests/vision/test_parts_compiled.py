"""A step with pictures, compiled for TPUs that are not here."""

import dataclasses

import pytest

from moe_jax.core.errors import InputError
from moe_jax.experts.shapes import FFNConfig
from moe_jax.planning.compile_only import compile_only
from moe_jax.planning.planned_training import planned_training
from moe_jax.training.flops import batch_flops, picture_flops
from moe_jax.training.recipe import MeshSection
from tests.support.seeing_models import seeing
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of

CONFIG = seeing(config_of(FFNConfig(dim=32), moe()))


@long
def test_a_step_with_pictures_is_compiled_for_a_slice():
    recipe = recipe_of(seq_len=32, mesh=MeshSection(fsdp=2, expert=2))
    reports = [compile_only(recipe, CONFIG, "v5e:2x2", pictures=pictures) for pictures in (0, 2)]
    of_tower = 8 * 2 * picture_flops(CONFIG).tower / 4
    assert "tower_share" not in reports[0]
    assert reports[1]["tower_share"] == pytest.approx(of_tower / reports[1]["model_flops"])
    more = (batch_flops(recipe, CONFIG, pictures=2) - batch_flops(recipe, CONFIG)) / 4
    assert reports[1]["model_flops"] - reports[0]["model_flops"] == pytest.approx(more)
    # Pixels are bytes, split over the rows of a batch, and slots are integers like tokens.
    taken = [report["bytes"]["arguments"] for report in reports]
    assert taken[1] - taken[0] >= 8 * 2 * 12 * 12 * 3 / 4 + 8 * 32 * 4 / 4


@long  # which measures this machine
def test_pictures_are_planned_where_the_step_is_compiled():
    recipe = recipe_of(seq_len=32)
    without, planned = (planned_training(recipe, CONFIG, "cpu", pictures=pictures) for pictures in (0, 1))
    batch = [next(item.bytes for item in one.items if item.name == "batch") for one in (without, planned)]
    assert batch[1] - batch[0] == 8 * 12 * 12 * 3 + 8 * 32 * 4
    with pytest.raises(InputError, match="pictures"):
        planned_training(recipe, CONFIG, "v5e:2x2", compiles=False, pictures=1)
    with pytest.raises(InputError, match="pictures"):
        planned_training(recipe, dataclasses.replace(CONFIG, vision=None), "cpu", pictures=1)
