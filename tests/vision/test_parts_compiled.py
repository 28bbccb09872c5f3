"""A step with pictures, compiled for TPUs that are not here."""

import dataclasses
import math

import jax
import pytest

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.sections import DataSection
from moe_jax.experts.shapes import FFNConfig
from moe_jax.model_io.frozen_tower import GROUP
from moe_jax.model_io.loading import TOWER, leaf_specs
from moe_jax.planning import compile_only as compiled_commands
from moe_jax.planning.compile_only import compile_only
from moe_jax.planning.frozen_gradients import frozen_gradients
from moe_jax.planning.planned_training import planned_training
from moe_jax.training.flops import batch_flops, picture_flops, step_flops
from moe_jax.training.program import make_program
from moe_jax.training.recipe import MeshSection, PartitionSection
from tests.support.seeing_models import seeing
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of, write_config

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


@long
@pytest.mark.parametrize(("options", "trained"), [({}, True), ({"feature_cache": "features"}, False)])
def test_a_step_counts_what_it_does_with_the_tower(options, trained):
    data = DataSection(seq_len=32, max_pictures=2, **options)
    partition = PartitionSection(train=(".*",)) if trained else PartitionSection()
    recipe = recipe_of(data=data, mesh=MeshSection(fsdp=4), partition=partition)
    found, text = (compile_only(recipe, CONFIG, "v5e:2x2", pictures=pictures) for pictures in (2, 0))
    flops = picture_flops(CONFIG)
    more = 8 * 2 * (3 * flops.tower * trained + 3 * flops.projector) / 4
    assert found["model_flops"] - text["model_flops"] == pytest.approx(more)
    assert found["tower_share"] == pytest.approx(8 * 2 * 3 * flops.tower * trained / 4 / found["model_flops"])
    # Features are floats: 9 of 16 numbers for every picture; pixels are bytes.
    taken = found["bytes"]["arguments"] - text["bytes"]["arguments"]
    assert taken >= 8 * 2 * (12 * 12 * 3 if trained else 9 * 16 * 4) / 4 + 8 * 32 * 4 / 4


def test_operations_of_pictures_follow_what_a_step_does_with_the_tower():
    flops = picture_flops(CONFIG)
    recipe, text = recipe_of(seq_len=32), batch_flops(recipe_of(seq_len=32), CONFIG)
    of_projector = 3 * flops.projector
    assert flops.of_step() == flops.tower + of_projector
    for use, passes in (("frozen", 1), ("trained", 3), ("kept", 0)):
        found = batch_flops(recipe, CONFIG, pictures=2, tower=use) - text
        assert found == pytest.approx(8 * 2 * (passes * flops.tower + of_projector))
    per_token = step_flops(CONFIG, 32, 32, tower="kept")
    assert per_token(10, pictures=3) - per_token(10) == pytest.approx(3 * of_projector)
    for options, use in (({}, "frozen"), ({"partition": PartitionSection(train=(".*",))}, "trained")):
        assert make_program(recipe_of(**options), CONFIG, jax.devices()[:1]).tower_use == use
    assert make_program(recipe_of(), CONFIG, jax.devices()[:1], pictures=1, features=True).tower_use == "kept"


def test_frozen_kernels_are_those_that_tokens_pass_through():
    recipe = recipe_of(seq_len=32)
    of_text = frozen_gradients(recipe, CONFIG, ["embed/embedding"])
    assert of_text == frozen_gradients(recipe, CONFIG, ["embed/embedding", "vision/projector/0/kernel"]) > 0


def test_the_command_takes_pictures_of_the_recipe(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(compiled_commands, "compile_only", lambda *_, **how: asked.append(how["pictures"]) or {})
    monkeypatch.setattr(compiled_commands, "print_report", lambda *_, **__: None)
    monkeypatch.setattr(compiled_commands, "check_fits", lambda report: None)
    config = write_config(tmp_path / "config.json", CONFIG)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'run_dir = "run"\n[model]\nconfig = "{config}"\n[data]\nmax_pictures = 2\n')
    command = ["train", str(recipe), "--compile-only", "--topology", "v5e:2x2"]
    for more in ([], ["--pictures", "3"], ["--set", "data.max_pictures=4"]):
        assert cli.main([*command, *more]) == 0
    assert asked == [2, 3, 4]
    assert cli.main(["train", str(recipe), "--pictures", "1"]) == 2


@long  # which measures this machine
def test_pictures_are_planned_where_the_step_is_compiled():
    recipe = recipe_of(seq_len=32)
    without, planned = (planned_training(recipe, CONFIG, "cpu", pictures=pictures) for pictures in (0, 1))
    batch = [next(item.bytes for item in one.items if item.name == "batch") for one in (without, planned)]
    assert batch[1] - batch[0] == 8 * 12 * 12 * 3 + 8 * 32 * 4
    # Where features are kept, the tower is there once more, whatever the number of devices.
    kept = recipe_of(data=DataSection(seq_len=32, feature_cache="features"))
    (apart,) = (
        one.bytes for one in planned_training(kept, CONFIG, "cpu", pictures=1).items if one.name == "image encoder"
    )
    parameters = sum(math.prod(leaf.shape) for path, leaf in leaf_specs(CONFIG).items() if path.startswith(TOWER))
    assert 4 * parameters < apart < 8 * parameters + 50 * GROUP * 10 * 32 * 4
    with pytest.raises(InputError, match="pictures"):
        planned_training(recipe, CONFIG, "v5e:2x2", compiles=False, pictures=1)
    with pytest.raises(InputError, match="pictures"):
        planned_training(recipe, dataclasses.replace(CONFIG, vision=None), "cpu", pictures=1)
