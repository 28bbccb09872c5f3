"""`moe-jax plan --train`: bytes against the arrays of a real run, and what it says of a memory that is too small."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types
from typing import Literal

import jax
import jax.numpy as jnp
import pytest

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig
from moe_jax.planning import compile_only, planned_devices, planned_training
from moe_jax.planning.compile_only import DoesNotFit
from moe_jax.planning.expected_step import kept_bytes
from moe_jax.planning.step_time import HeldBytes, Rates, optimizer_operations, step_time
from moe_jax.training.program import abstract_batch, first_state, initial_states, make_program
from moe_jax.training.recipe import (
    EmaSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PartitionSection,
    TrainSection,
)
from tests.support.environment import ROOT
from tests.support.tiers import long, one_in
from tests.support.training_models import FFN, config_of, moe, recipe_of, write_config

ONE = MeshSection(data=1, fsdp=1)
CHANGED = ("--set", "train.batch_size=4", "ema.decay=0.9")
BY_NAME = {
    "params": "parameters, trained",
    "frozen": "parameters, frozen",
    "opt_state": "optimizer",
    "ema": "moving average",
}


@pytest.fixture
def one_device(monkeypatch):
    """The machine as it is without the tests' eight devices. No step is run to know its time."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(planned_training, "timed_step", lambda *_: None)


@pytest.fixture(scope="module")
def programs() -> dict:
    return {}


@pytest.fixture
def compiled_once(monkeypatch, programs):
    """The step of the recipe in `folder` is compiled for the first of the tests that need no more than that it is."""
    compile_step = planned_training.compiled_step

    def compiled(program, recipe):
        key = recipe.train, recipe.ema, str(program.config)
        if key not in programs:
            programs[key] = compile_step(program, recipe)
        return programs[key]

    monkeypatch.setattr(planned_training, "compiled_step", compiled)


@pytest.fixture
def folder(tmp_path):
    write_config(tmp_path / "config.json", config_of(FFN))
    (tmp_path / "recipe.toml").write_text(
        f'run_dir = "run"\n[model]\nconfig = "{tmp_path}/config.json"\ninit = "random"\n'
        "[data]\nseq_len = 16\n[train]\nbatch_size = 8\nsteps = 50\n"
    )
    return tmp_path


def bytes_of_arrays(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@one_in(3, first=2)
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"optimizer": OptimizerSection(kind="muon", moments="bfloat16"), "ema": EmaSection()},
        {
            "model": ModelSection(config="c", init="random", param_dtype="bfloat16", frozen_dtype="bfloat16"),
            "optimizer": OptimizerSection(kind="adafactor"),
            "partition": PartitionSection(train=("layers/1/mlp/.*",)),
        },
    ],
    ids=["adamw", "muon, average", "adafactor, frozen"],
)
def test_what_is_held_is_what_a_run_holds(sections, one_device):
    # Of another shape, so that layers are not stacked.
    second = dataclasses.replace(FFN, dim=64) if "partition" in sections else moe()
    config, recipe = config_of(FFN, second, d_model=128), recipe_of(mesh=ONE, **sections)
    planned = planned_training.planned_training(recipe, config)
    found = {item.name: item.bytes for item in planned.items}
    program = make_program(recipe, config, jax.devices())
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program, recipe, None)
        state = first_state(program, params)
    real = {name: bytes_of_arrays(getattr(state, name)) for name in ("params", "opt_state", "ema")}
    real["opt_state"] += state.step.nbytes
    real["frozen"] = bytes_of_arrays(frozen)
    assert {BY_NAME[name]: size for name, size in real.items() if size} == {
        name: found[name] for name in BY_NAME.values() if name in found
    }
    like = abstract_batch(recipe, config, program.mesh)
    assert found["batch"] == sum(leaf.size * leaf.dtype.itemsize for leaf in like.values())
    # The compiler holds gradients of the trained parameters in float32, and counts the same arguments.
    assert found["gradients"] == 4 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert found["activations"] > 0 and "padding" not in found
    assert planned.total == sum(found.values()) and found["process"] > 50e6
    assert planned.fits and not planned.tight and planned.is_compiled


@long
def test_microbatches_take_less(one_device):
    def activations(accumulation: int) -> int:
        recipe = recipe_of(mesh=ONE, seq_len=64, train=TrainSection(batch_size=8, accumulation=accumulation))
        found = planned_training.planned_training(recipe, config_of(FFN, FFN, FFN, FFN))
        return next(item.bytes for item in found.items if item.name == "activations")

    assert activations(4) < activations(1)


def test_without_a_compiler_what_is_kept_is_estimated_for_every_device(monkeypatch):
    monkeypatch.setattr(planned_devices, "has_gpu_compiler", lambda: False)
    config = config_of(FFN, moe(), d_model=64)
    recipe = recipe_of(mesh=MeshSection(fsdp=4, data=2))
    planned = planned_training.planned_training(recipe, config, "h100:8")
    found = {item.name: item.bytes for item in planned.items}
    assert not planned.is_compiled and planned.devices == 8
    program = make_program(recipe, config, jax.devices())
    for name, tree in (("parameters, trained", program.state.params), ("optimizer", program.state.opt_state)):
        shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(tree))
        sizes = [4 * jnp.zeros(shape).size for shape in shards]
        assert sum(sizes) <= found[name] <= sum(sizes) + 4
    assert 50 << 20 <= found["program"] <= 110 << 20
    # The input of every layer and its hidden neurons, for the backward pass, of the rows of one device.
    assert found["activations"] > 16 * 4 * (2 * 64 + 2 * 32)
    alone = planned_training.planned_training(dataclasses.replace(recipe, mesh=ONE), config, "h100:1")
    # One device has all rows, but gathers nothing.
    assert next(item.bytes for item in alone.items if item.name == "activations") > 2 * found["activations"]
    with pytest.raises(InputError, match="mesh"):
        planned_training.planned_training(recipe, config, "h100:3")


def test_remat_keeps_less_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(planned_devices, "has_gpu_compiler", lambda: False)

    def kept(remat: Literal["none", "full", "dots"]) -> int:
        recipe = recipe_of(mesh=ONE, model=ModelSection(config="c", init="random", remat=remat))
        planned = planned_training.planned_training(recipe, config_of(FFN, FFN, FFN, FFN), "h100")
        return next(item.bytes for item in planned.items if item.name == "activations")

    assert kept("full") < kept("dots") < kept("none")


def test_time_follows_operations_and_bytes():
    config = config_of(FFN)
    sizes = dict(params=1000, frozen=0, optimizer=2000, average=0, gradients=1000)
    held = HeldBytes(**sizes)
    rates = Rates(operations=1e9, bytes=1e6, source="", overlap=False)
    time = step_time(recipe_of(), config, held, 500, 1, rates)
    assert time.seconds == pytest.approx(time.products + time.bytes)
    assert time.bytes == pytest.approx((2 * 1000 + 2 * 500 + 2 * 4000) / 1e6)
    assert time.tokens_per_second == pytest.approx(8 * 16 / time.seconds)
    full = ModelSection(config="c", init="random", remat="full")
    again = step_time(recipe_of(model=full), config, held, 500, 1, rates)
    assert again.operations == pytest.approx(time.operations * 8 / 6)
    assert again.bytes == pytest.approx((3 * 1000 + 2 * 500 + 2 * 4000) / 1e6)
    four = step_time(recipe_of(train=TrainSection(steps=4, batch_size=8, accumulation=4)), config, held, 500, 1, rates)
    assert four.bytes == pytest.approx((4 * (2 * 1000 + 2 * 500) + 2 * 4000) / 1e6)
    taught = step_time(recipe_of(), config, HeldBytes(**sizes, teacher=700), 500, 1, rates, teacher=config)
    assert taught.operations == pytest.approx(time.operations * 8 / 6)  # forward alone
    assert taught.bytes == pytest.approx((2 * 1000 + 700 + 2 * 500 + 2 * 4000) / 1e6)
    shared = step_time(recipe_of(), config, held, 500, 2, rates, 600.0)
    assert shared.operations == pytest.approx((time.operations + 600) / 2)
    parts = recipe_of(train=TrainSection(batch_size=8, accumulation=2))
    loads_first, without = (step_time(parts, config_of(moe(balance_coef=x)), held, 500, 1, rates) for x in (0.01, 0.0))
    assert loads_first.operations == pytest.approx(without.operations * 8 / 6)
    assert loads_first.bytes - without.bytes == pytest.approx(2 * 1000 / 1e6)
    frozen = step_time(recipe_of(), config, held, 500, 1, rates, frozen=time.operations / 3)
    assert frozen.operations == pytest.approx(time.operations * 4 / 6)
    at_once = step_time(recipe_of(), config, held, 500, 1, dataclasses.replace(rates, overlap=True))
    assert max(time.products, time.bytes) <= at_once.seconds < time.seconds


def test_muon_has_products_of_its_own():
    shapes = {"stack/segments/0/blocks/0/mlp/up/kernel": (3, 4, 10), "embed/embedding": (100, 4)}
    # X X', A A and A X, five times, for three layers; AdamW's embedding has none.
    each = 2 * 4 * 10 * 4 + 2 * 4 * 4 * 4 + 2 * 4 * 4 * 10
    assert optimizer_operations(OptimizerSection(kind="muon"), shapes) == 3 * 5 * each
    assert optimizer_operations(OptimizerSection(), shapes) == 0


def test_the_command_prints_it_and_writes_nothing(folder, one_device, compiled_once, capsys):
    before = sorted(folder.iterdir())
    words = ["plan", "--train", str(folder / "recipe.toml"), *CHANGED]
    assert cli.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    training = plan["training"]
    sizes = {item["name"]: item["bytes"] for item in training["items"]}
    assert sizes["parameters, trained"] == 4 * plan["total_params"] == sizes["moving average"]
    assert training["total"] == sum(sizes.values()) and training["fits"] is True
    assert training["steps"] == 50 and "checkpoint" not in sizes
    assert training["run_seconds"] == pytest.approx(50 * training["time"]["seconds"])
    assert cli.main([*words, "--set", "checkpoint.every=10"]) == 0
    out = capsys.readouterr().out
    assert "4 rows of 16 tokens" in out and "moving average" in out and "checkpoint" in out and "tokens/s" in out
    assert sorted(folder.iterdir()) == before


def test_a_model_may_be_given_beside_the_recipe(folder, monkeypatch, capsys):
    monkeypatch.setattr(planned_devices, "has_gpu_compiler", lambda: False)
    words = ["plan", str(folder / "config.json"), "--experts", "4", "--every", "1", "--platform", "h100", "--train"]
    assert cli.main([*words, str(folder / "recipe.toml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    trained = next(item for item in plan["training"]["items"] if item["name"] == "parameters, trained")
    assert trained["bytes"] == 4 * plan["total_params"] > 4 * plan["dense_params"]


def test_the_environment_of_a_compiler_is_made_before_anything_else(folder, monkeypatch, capsys):
    def prepare():
        raise InputError("prepared")

    monkeypatch.setattr(planned_devices, "prepare_environment", prepare)
    words = ["plan", "--train", str(folder / "recipe.toml"), "--platform"]
    assert cli.main([*words, "h100"]) == 2 and "error: prepared" in capsys.readouterr().err
    assert cli.main([*words, "h200:2x8"]) == 2 and "error: prepared" in capsys.readouterr().err


def test_little_memory_is_said(folder, one_device, compiled_once, capsys, monkeypatch):
    words = ["plan", "--train", str(folder / "recipe.toml"), *CHANGED]
    assert cli.main([*words, "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["training"]["total"]
    for memory, said in ((1.05, "warning: more than 90%"), (0.9, "does not fit"), (2, "in all")):
        monkeypatch.setattr(planned_training, "total_memory", lambda memory=memory: int(memory * total))
        assert cli.main(words) == 0
        out = capsys.readouterr().out
        assert said in out and ("warning" in out, "does not fit" in out) == (memory == 1.05, memory == 0.9)


def test_a_compiler_that_finds_no_room_is_no_error(one_device, monkeypatch):
    recipe, config = recipe_of(mesh=ONE), config_of(FFN)

    def refuse(program, recipe):
        message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 16.50G of 15.75G hbm. Exceeded by"
        raise DoesNotFit(message, compile_only._used(message))

    monkeypatch.setattr(planned_training, "compiled_step", refuse)
    planned = planned_training.planned_training(recipe, config)
    assert planned.fits is False
    process = next(item.bytes for item in planned.items if item.name == "process")
    assert planned.total - process == pytest.approx(16.5 * 2**30, abs=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train", "nothing.toml"], "no recipe at nothing.toml"),
        (["--train", "upcycle_smal"], "did you mean 'upcycle_small'"),
        (["--train", "RECIPE", "--set", "train.batchsize=4"], "batchsize"),
        (["--train", "RECIPE", "--set", "mesh.fsdp=3"], "does not fit"),
        (["--train", "RECIPE", "--platform", "v6"], "v6e"),
        (["--train", "RECIPE", "--platform", "v5e:wide"], "expected a topology"),
        (["--train", "RECIPE", "--optimizer", "muon"], "--optimizer: the recipe says"),
        (["--set", "train.steps=3"], "--set: only with --train"),
        ([], "missing: CONFIG_OR_MODEL"),
    ],
)
def test_bad_input_is_one_line(folder, one_device, capsys, words, message):
    words = [str(folder / "recipe.toml") if word == "RECIPE" else word for word in words]
    assert cli.main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("moe-jax: error:") == 1 and message in captured.err


@long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_bytes_of_a_slice_are_those_of_compile_only(folder):
    attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=32)
    layer = LayerConfig(attention=attention, mlp=FFNConfig(dim=128))
    config = dataclasses.replace(config_of(FFN, d_model=128), layers=(layer,))
    write_config(folder / "config.json", config)
    clean = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    # Both in one process, whose environment has to be described before JAX is imported.
    both = (
        "from moe_jax.commands.cli import main\n"
        "main(['plan', '--train', 'recipe.toml', '--platform', 'v5e:2x2', '--json'])\nprint('---')\n"
        "main(['train', 'recipe.toml', '--compile-only', '--topology', 'v5e:2x2', '--json'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", both],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    plan, compiled = map(json.loads, done.stdout.split("---"))
    training = plan["training"]
    assert training["total"] == compiled["bytes"]["total"] and training["mesh"] == compiled["mesh"]
    assert (training["devices"], training["memory"], training["is_compiled"]) == (4, 16 * 2**30, True)
    sizes = {item["name"]: item["bytes"] for item in training["items"]}
    norms = 4 * 3 * 128
    assert sizes["parameters, trained"] == (4 * plan["total_params"] - norms) // 4 + norms
    assert "process" not in sizes and training["is_least"] and training["time"]["seconds"] > 0


def test_a_compiler_for_gpus_is_that_of_either_cuda(monkeypatch):
    for there in ("jax_cuda12_plugin", "jax_cuda13_plugin", None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: there if name == there else None)
        assert planned_devices.has_gpu_compiler() == (there is not None)


def test_what_the_compiler_is_asked_for_reaches_it():
    recipe, asked = recipe_of(mesh=ONE), []

    class Lowered:
        def compile(self, compiler_options=None):
            asked.append(compiler_options)
            return "compiled"

    program = make_program(recipe, config_of(FFN), jax.devices()[:1])
    program = dataclasses.replace(program, step=types.SimpleNamespace(lower=lambda *_: Lowered()))
    assert compile_only.compiled_step(program, recipe, {"xla_option": True}) == "compiled"
    assert asked == [{"xla_option": True}]


@pytest.mark.parametrize(
    ("platform", "mesh", "compiles", "count", "devices", "per_host", "missing"),
    [
        ("v5e:4x4", {}, True, 16, "v5e:4x4", None, ""),
        ("v5p:2x2x4", {}, False, 16, None, None, ""),
        ("v5e", {"fsdp": 3}, True, 3, 3, None, ""),  # of the smallest slice
        ("h100:2x8", {}, True, 16, "h100:2x8", None, ""),
        ("h100:2x8", {}, False, 16, None, 8, ""),
        ("h100:2x4", {}, False, 8, None, 4, ""),
        ("h100", {"fsdp": 4, "expert": 3}, False, 12, None, 8, ""),
        ("h100", {"fsdp": 4}, False, 4, None, 4, ""),
        ("h100", {"fsdp": 4}, True, 4, "h100:4", None, ""),
    ],
)
def test_the_devices_of_a_platform(monkeypatch, platform, mesh, compiles, count, devices, per_host, missing):
    asked = []
    monkeypatch.setattr(planned_devices, "has_gpu_compiler", lambda: True)
    monkeypatch.setattr(planned_devices, "has_tpu_compiler", lambda: True)
    monkeypatch.setattr(planned_devices, "described_devices", lambda name: asked.append(name) or list(range(99)))
    section = MeshSection(**{"data": 1, "fsdp": 1, **mesh})
    found = planned_devices.planned_devices(section, platform, compiles=compiles)
    assert (found.count, found.per_host, found.missing) == (count, per_host, missing)
    assert found.chip is not None and found.name == platform
    if isinstance(devices, int):
        assert found.devices == list(range(devices))
    else:
        assert asked == ([] if devices is None else [devices]) and bool(found.devices) == bool(asked)


def test_a_microbatch_keeps_its_share():
    def kept(accumulation: int) -> int:
        recipe = recipe_of(mesh=ONE, train=TrainSection(steps=1, batch_size=8, accumulation=accumulation))
        return kept_bytes(make_program(recipe, config_of(FFN), jax.devices()[:1]), recipe)

    assert 0.2 < kept(4) / kept(1) < 0.35
