"""`moe-jax plan --propose`: proposals against single plans, the compiler, and the meshes that training accepts."""

import dataclasses
import json
import shlex
import sys

import jax
import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.models import FFNConfig, config_from_json
from moe_jax.planning import expected_step, planned_devices, proposals
from moe_jax.planning.planned_training import planned_training
from moe_jax.planning.proposals import propose
from moe_jax.planning.slice_names import larger_slices
from moe_jax.training.program import make_program
from moe_jax.training.recipe import OptimizerSection, Recipe, load_recipe
from tests.support.environment import ROOT
from tests.support.tiers import long
from tests.support.training_models import FFN, config_of, moe, recipe_of, write_config

sys.path.append(str(ROOT / "benchmarks"))

import pods  # noqa: E402
from evidence.results import Figures  # noqa: E402

WIDE = config_of(FFNConfig(dim=4096), d_model=1024)
SMALL = config_of(FFN, moe(), d_model=64)


def with_settings(recipe: Recipe, settings: tuple[str, ...]) -> Recipe:
    """The recipe as `--set` would have it."""
    for setting in settings:
        key, value = setting.split("=")
        section, name = key.split(".")
        old = getattr(recipe, section)
        new = int(value) if isinstance(getattr(old, name), int) else value
        recipe = dataclasses.replace(recipe, **{section: dataclasses.replace(old, **{name: new})})
    return recipe


@pytest.fixture
def untraced(monkeypatch):
    """The backward pass keeps a thousand bytes of a row, for tracing it takes a second."""
    monkeypatch.setattr(expected_step, "kept_bytes", lambda program, recipe: 1000 * rows_of(recipe))


def rows_of(recipe: Recipe) -> int:
    return recipe.train.batch_size // recipe.train.accumulation


@pytest.fixture
def memory(monkeypatch):
    """Sets the bytes of a chip's memory."""

    def to(size: int, name: str = "v5e") -> None:
        chips = planned_devices.CHIPS
        monkeypatch.setattr(planned_devices, "CHIPS", {**chips, name: chips[name]._replace(memory=size)})

    return to


@pytest.mark.parametrize(
    "name",
    [
        "ders_coder_moe (low-rank deltas, rank 16, v5e:4x4)",
        pytest.param("perft_mixtral (PERFT-R beside full experts, v6e:2x4)", marks=long),
        pytest.param("camelidae_8x7b (PESC over NF4, v5e:2x4)", marks=long),
    ],
)
def test_the_numbers_are_those_of_a_plan_and_within_a_tenth_of_the_compilers(name):
    (step,) = (step for step in pods.STEPS if step.name == name)
    recipe = load_recipe(pods.RECIPES / f"{step.recipe}.toml", list(step.options))
    config = config_from_json(pods.config_of(step), where="config")
    found = propose(recipe, config, step.topology)
    assert len(found.proposals) > 5 and found.nearest is found.on_smallest is None
    for one in (found.proposals[0], found.proposals[-1]):
        planned = planned_training(with_settings(recipe, one.settings), config, step.topology, compiles=False)
        assert planned.roofline is not None
        assert (one.bytes, one.mesh, one.tight) == (planned.total, planned.mesh, planned.tight)
        assert (one.seconds, one.run_seconds) == (planned.roofline.seconds, planned.run_seconds)
    cells = Figures("pods").get("rows", step.table, step.name)["cells"]
    compiled = cells[3].replace(" ", "="), cells[5] * pods.GIB
    axes = {axis: int(size) for axis, size in (part.split() for part in cells[3].split(", "))}
    at_least = min(one.seconds for one in found.proposals)
    assert found.proposals[0].seconds == pytest.approx(at_least, rel=0.011)
    if recipe.train.accumulation == 1:
        alike = [one for one in found.proposals if (one.remat, {**one.mesh, **axes}) == (recipe.model.remat, one.mesh)]
        for one in alike:
            assert one.bytes == pytest.approx(compiled[1], rel=0.1)
        assert alike or recipe.model.remat != found.proposals[0].remat


def test_training_accepts_every_mesh_and_those_left_out_divide_something_badly(untraced):
    recipe, devices = recipe_of(batch_size=8), jax.devices()[:8]
    found = propose(recipe, SMALL, "v5e:2x4", most=100)
    assert len(found.proposals) > 3
    for one in found.proposals:
        program = make_program(with_settings(recipe, one.settings), SMALL, devices)
        assert dict(program.mesh.shape) == one.mesh
        heads = SMALL.layers[0].attention.num_heads
        assert heads % one.mesh["tensor"] == 0 and moe().num_experts % one.mesh["expert"] == 0


def test_the_first_leaves_room_and_takes_least_time_then_least_memory(untraced):
    found = propose(recipe_of(batch_size=8), SMALL, "v5e:2x4", most=100).proposals
    times = [one.seconds for one in found]
    assert all(later > 0.985 * earlier for earlier, later in zip(times, times[1:], strict=False))
    assert not found[0].tight and found[0].param_dtype == found[0].moments == "float32"
    assert found[0].tokens_per_second * found[0].seconds == pytest.approx(8 * recipe_of().data.seq_len)


def test_batches_are_split_no_more_than_needed(memory, untraced):
    recipe = recipe_of(batch_size=64)
    roomy = propose(recipe, SMALL, "v5e:1x1").proposals[0]
    assert roomy.accumulation == 1 and set(roomy.settings) <= {"model.remat=full", "model.remat=dots"}
    by_count = [planned_training(with_settings(recipe, ("model.remat=full", f"train.accumulation={count}")), SMALL,
                                 "v5e:1x1", compiles=False).total for count in (1, 2, 4)]  # fmt: skip
    assert by_count[0] > by_count[1] > by_count[2]
    # Room for two, and a tenth more.
    memory(round(by_count[1] / 0.9) + 1)
    tight = propose(recipe, SMALL, "v5e:1x1").proposals[0]
    assert (tight.bytes, tight.accumulation, tight.tight) == (by_count[1], 2, False)
    assert tight.settings == ("model.remat=full", "train.accumulation=2")


def test_dtypes_change_only_where_nothing_fits_otherwise(memory, untraced):
    recipe, wide = with_settings(recipe_of(batch_size=8), ("model.compute_dtype=bfloat16",)), WIDE
    least = []
    for changed in proposals._with_dtypes(recipe):
        found = propose(changed, wide, "v5e:2x2", most=100).proposals
        least.append(min(one.bytes for one in found))
    assert least == sorted(least, reverse=True) and len(set(least)) == 3
    kinds = {}
    for bytes_ in least:
        memory(round(bytes_ / 0.9) + 1)
        one = propose(recipe, wide, "v5e:2x2").proposals[0]
        kinds[one.moments, one.param_dtype] = [key for key in one.settings if key.endswith("=bfloat16")]
    assert kinds == {
        ("float32", "float32"): [],
        ("bfloat16", "float32"): ["optimizer.moments=bfloat16"],
        ("bfloat16", "bfloat16"): ["model.param_dtype=bfloat16", "optimizer.moments=bfloat16"],
    }


def test_a_recipe_of_adafactor_has_no_moments_to_change():
    recipe = dataclasses.replace(recipe_of(), optimizer=OptimizerSection(kind="adafactor"))
    changed = [(one.optimizer.moments, one.model.param_dtype) for one in proposals._with_dtypes(recipe)]
    assert changed == [("float32", "float32"), ("float32", "bfloat16")]


def test_where_nothing_fits_the_nearest_and_the_smallest_slice_are_said(memory, untraced):
    recipe, wide = with_settings(recipe_of(batch_size=8), ("model.compute_dtype=bfloat16",)), WIDE
    alone = propose(recipe, wide, "v5e:1x1").proposals[0].bytes
    on_four = min(one.bytes for one in propose(recipe, wide, "v5e:2x2", most=100).proposals)
    memory(round(on_four / 0.9) + 1)
    found = propose(recipe, wide, "v5e:1x1")
    nearest, there = found.nearest, found.on_smallest
    assert not found.proposals and nearest is not None and there is not None
    assert found.memory < nearest.bytes < alone and not nearest.fits and nearest.remat == "full"
    assert nearest.param_dtype == nearest.moments == "bfloat16"
    assert there.fits and not there.tight and found.smallest_platform == "v5e:2x2"


@pytest.mark.parametrize(
    ("topology", "count", "expected"),
    [
        ("v5e:2x2", 4, ["v5e:2x4", "v5e:4x4"]),
        ("v5p:2x2x1", 4, ["v5p:2x2x2", "v5p:2x2x4"]),
        ("h100:4", 4, ["h100:8", "h100:2x8"]),
        ("v6e:1x3", 3, ["v6e:2x2", "v6e:2x4"]),
        ("v5e:1x1", 1, ["v5e:2x2", "v5e:2x4"]),
        ("v6e:8x16", 128, ["v6e:16x16"]),
        ("v7x:2x2x1", 4, []),
    ],
)
def test_larger_slices_are_the_next_powers_of_two(topology, count, expected):
    assert list(larger_slices(topology, count))[:2] == expected


@pytest.fixture
def folder(tmp_path):
    write_config(tmp_path / "config.json", SMALL)
    (tmp_path / "recipe.toml").write_text(
        f'run_dir = "run"\n[model]\nconfig = "{tmp_path}/config.json"\ninit = "random"\n'
        "[data]\nseq_len = 16\n[train]\nbatch_size = 16\nsteps = 50\n"
    )
    return tmp_path


def test_the_command_prints_what_to_type(folder, untraced, capsys):
    words = ["plan", "--train", str(folder / "recipe.toml"), "--set", "train.steps=7", "--platform", "v5p-16"]
    assert cli.main([*words, "--propose"]) == 0
    printed = capsys.readouterr().out
    assert "training on v5p:2x2x2, 8 chips" in printed and "--compile-only --topology v5p:2x2x2" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("  moe-jax train "))
    command = shlex.split(line)
    assert command[:4] == ["moe-jax", "train", str(folder / "recipe.toml"), "--set"]
    recipe = load_recipe(command[2], command[4:])
    assert recipe.train.steps == 7
    assert cli.main([*words, "--propose", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["proposals"]
    assert found["proposals"][0]["settings"] == command[5:] and command[4] == "train.steps=7"
    assert make_program(recipe, SMALL, jax.devices()[:8]).mesh.shape == found["proposals"][0]["mesh"]


def test_what_is_typed_trains_the_model_of_the_plan(tmp_path, folder, untraced, capsys, monkeypatch):
    (tmp_path / "given").mkdir()
    write_config(tmp_path / "given/config.json", SMALL)
    words = ["plan", str(tmp_path / "given"), "--train", str(folder / "recipe.toml"), "--set", "mesh.fsdp=3"]
    assert cli.main([*words, "--platform", "v5p-16", "--propose"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  moe-jax train "))
    settings = shlex.split(line)[4:]
    assert f"model.path={tmp_path / 'given'}" in settings
    assert "mesh.fsdp=3" not in settings, "the proposal has another"


def test_a_batch_of_any_size_has_proposals_at_once(folder, untraced, capsys):
    words = ["plan", "--train", str(folder / "recipe.toml"), "--platform", "v5p-8", "--propose"]
    assert cli.main([*words, "--set", f"train.batch_size={2**31 - 1}"]) == 0
    assert "mesh" in capsys.readouterr().out


@long
def test_the_command_says_what_is_missing(folder, memory, untraced, capsys):
    memory(1 << 20, "v5p")
    assert cli.main(["plan", "--train", str(folder / "recipe.toml"), "--platform", "v5p-16", "--propose"]) == 0
    printed = capsys.readouterr().out
    assert "nothing fits v5p:2x2x2" in printed and "lacks" in printed and "nothing fits a larger slice" in printed
    assert cli.main(
        ["plan", "--train", str(folder / "recipe.toml"), "--platform", "v5p:7x1x1", "--propose"]
    ) == 0  # fmt: skip
    assert "no mesh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--propose: needs --train"),
        (["--platform", "v5p"], "proposals need a number of chips"),
        (["--platform", "cpu"], "proposals need a number of chips"),
        (["--platform", "v5p-16", "--mesh", "fsdp=8"], "leave out --mesh"),
        (["--platform", "v9"], "v9"),
    ],
)
def test_bad_input_is_one_line(folder, words, message, capsys):
    assert cli.main(["plan", "--train", str(folder / "recipe.toml"), "--propose", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert message in line


def test_python_has_them_in_the_plan(folder, untraced):
    recipe = {"run_dir": "run", "model": {"config": "c.json", "init": "random"}, "train": {"batch_size": 8, "steps": 2}}
    planned = moe_jax.plan(SMALL, propose=recipe, platform="v5e:2x4")
    assert planned.strategies is None and planned.proposals is not None and planned.proposals.proposals
    again = moe_jax.plan(SMALL, propose=folder / "recipe.toml", platform="v5e:2x4")
    assert again.proposals is not None and again.proposals.devices == 8
    with pytest.raises(InputError, match="needs a platform"):
        moe_jax.plan(SMALL, propose=recipe)
