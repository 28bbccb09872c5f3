"""What is expected of a step without a compiler, against what compilers say of the same step."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, config_from_json
from moe_jax.planning.planned_training import PlannedTraining, planned_training
from moe_jax.training.flops import batch_flops
from moe_jax.training.recipe import MeshSection, Recipe, load_recipe
from tests.support.environment import ROOT
from tests.support.tiers import long, one_in
from tests.support.training_models import FFN, config_of, moe, recipe_of, write_config

sys.path.append(str(ROOT / "benchmarks"))

import pods  # noqa: E402
from evidence.results import Figures  # noqa: E402

WITHIN = 0.1


def _compiled() -> dict[str, list]:
    figures = Figures("pods")
    rows = {step.name: figures.get("rows", step.table, step.name) for step in pods.STEPS}
    return {name: row["cells"] for name, row in rows.items() if row is not None}


COMPILED = _compiled()
STEPS = [step for step in pods.STEPS if step.table == pods.POD_STEPS.name]
TPU_STEPS, GPU_STEPS = ([step for step in STEPS if step.is_on_gpus == gpus] for gpus in (False, True))


def _is_as_it_was_then(step: pods.Step) -> bool:
    """Whether a row was compiled before loads were counted first and frozen kernels were known to have no gradients."""
    return Figures("pods").stamp_of("rows", step.table, step.name).date < "2026-11-27"


def _recipe_and_config(step: pods.Step) -> tuple[Recipe, ModelConfig]:
    recipe = load_recipe(pods.RECIPES / f"{step.recipe}.toml", list(step.options))
    config = config_from_json(pods.config_of(step), where="config")
    return recipe, _without_losses(config) if _is_as_it_was_then(step) else config


def _expected(step: pods.Step) -> PlannedTraining:
    return planned_training(*_recipe_and_config(step), step.topology, compiles=False)


def _without_losses(config: ModelConfig) -> ModelConfig:
    """What was compiled had no run ahead of its microbatches, in which loads are counted for auxiliary losses."""
    none = dict.fromkeys(("balance_coef", "z_coef", "cv_coef"), 0.0)
    layers = (
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, **none))
        if isinstance(layer.mlp, MoEConfig)
        else layer
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=tuple(layers))


@one_in(4)
@pytest.mark.parametrize("step", TPU_STEPS, ids=lambda step: step.name)
def test_it_is_within_a_tenth_of_what_the_compiler_said(step):
    *_, held, total, _, _, matrix, memory, links, least, used = COMPILED[step.name]
    found = _expected(step)
    assert not found.is_compiled and found.roofline is not None and found.roofline.links is not None
    if _is_as_it_was_then(step):
        recipe, config = _recipe_and_config(step)
        assert found.model_flops is not None and found.speeds is not None
        spared = 1e3 * (batch_flops(recipe, config) / found.devices - found.model_flops) / found.speeds["products"]
        made, matrix = used * least - spared, matrix - spared
        least = max(matrix, memory, links)
        used = made / least
    sizes = {item.name: item.bytes / 2**30 for item in found.items}
    arguments = sum(sizes.get(name, 0) for name in ("parameters, trained", "parameters, frozen", "optimizer", "batch"))
    # What the compiler adds are paddings.
    assert arguments == pytest.approx(held, rel=0.03)
    assert found.total / 2**30 == pytest.approx(total, rel=WITHIN)
    assert 1e3 * found.roofline.matrix == pytest.approx(matrix, rel=1e-6)
    assert 1e3 * found.roofline.links == pytest.approx(links, rel=WITHIN)
    assert 1e3 * found.roofline.seconds == pytest.approx(least, rel=WITHIN)
    assert found.roofline.utilisation == pytest.approx(used, rel=WITHIN)


@pytest.mark.parametrize("step", GPU_STEPS, ids=lambda step: step.name)
def test_on_gpus_it_is_no_less_and_a_fifth_more_at_most(step):
    *_, total, _, _, _, _, _, least, _ = COMPILED[step.name]
    found = _expected(step)
    assert found.roofline is not None
    assert total < found.total / 2**30 < 1.2 * total
    assert 1e3 * found.roofline.seconds == pytest.approx(least, rel=WITHIN)


def _middle(mlp: FFNConfig | MoEConfig) -> ModelConfig:
    """A model between those of tests and of recipes."""
    attention = AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=128)
    layers = (LayerConfig(attention=attention, mlp=mlp),) * 4
    config = config_of(FFN, d_model=2048, vocab_size=32000, max_positions=4096, bos_id=1, eos_ids=(2,))
    return dataclasses.replace(config, layers=layers)


_DENSE = FFNConfig(dim=5632)
_MOE = MoEConfig(expert=FFNConfig(dim=1408), num_experts=8, top_k=2, bank=BankConfig())


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@long
@pytest.mark.parametrize(
    ("mlp", "topology", "axes", "kinds"),
    [
        (_DENSE, "v5p:2x2x1", {"fsdp": 2, "tensor": 2}, ("all-gather", "all-reduce", "reduce-scatter")),
        (_DENSE, "v5p:2x2x1", {"fsdp": 2, "sequence": 2}, ("all-to-all", "reduce-scatter")),
        (_MOE, "v5p:2x2x2", {"expert": 4, "tensor": 2}, ("all-reduce", "ragged-all-to-all")),
    ],
    ids=["tensor", "sequence", "expert"],
)
def test_axes_that_no_recipe_uses_are_counted(tmp_path, mlp, topology, axes, kinds):
    write_config(tmp_path / "config.json", _middle(mlp))
    (tmp_path / "recipe.toml").write_text(
        'run_dir = "run"\n[model]\nconfig = "config.json"\ncompute_dtype = "bfloat16"\nremat = "full"\n'
        f"[data]\nseq_len = 4096\n[train]\nbatch_size = {axes.get('fsdp', 1) * axes.get('expert', 1)}\n[mesh]\n"
        + "".join(f"{axis} = {axes.get(axis, 1)}\n" for axis in ("fsdp", "expert", "sequence", "tensor"))
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = ["train", "recipe.toml", "--compile-only", "--topology", topology, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "moe_jax.commands.cli", *command],
        cwd=tmp_path, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    found = planned_training(load_recipe(tmp_path / "recipe.toml", []), _middle(mlp), topology, compiles=False)
    assert found.sent is not None and found.roofline is not None
    # A smaller model has larger differences: 12% at most.
    assert found.total == pytest.approx(compiled["bytes"]["total"], rel=0.13)
    assert found.model_flops == pytest.approx(compiled["model_flops"])
    assert found.roofline.seconds == pytest.approx(compiled["estimate"]["seconds"], rel=WITHIN)
    for kind in kinds:
        # Small arrays are gathered with others, or not at all.
        assert found.sent[kind].bytes == pytest.approx(compiled["collectives"][kind]["bytes"], rel=0.15)


def test_a_mesh_says_what_a_step_would_take_there(tmp_path, capsys):
    file = write_config(tmp_path / "config.json", config_of(FFN, moe(), d_model=64))
    words = ["plan", str(file), "--mesh", "fsdp=4,expert=2", "--platform", "v5p", "--tokens", "64"]
    assert cli.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    training = plan["training"]
    assert training["devices"] == 8 and not training["is_compiled"] and training["mesh"]["expert"] == 2
    sizes = {item["name"]: item["bytes"] for item in training["items"]}
    assert sizes["parameters, trained"] == plan["training_bytes_per_chip"]["params"]
    assert training["run_seconds"] == training["roofline"]["seconds"] and training["run_tokens"] == 8 * 64
    gathered = training["sent"]["all-gather"]
    assert gathered["bytes"] / 2 < gathered["sent"] < gathered["bytes"]
    assert training["total"] == sum(sizes.values())
    assert training["sent"]["all-gather"]["bytes"] > 0 and training["roofline"]["bound"] in ("memory", "links")
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "sent by each in a step, as in a ring: all-gather" in out and "at most" in out and "utilisation" in out


def test_a_recipe_is_tried_on_another_mesh(tmp_path, capsys):
    write_config(tmp_path / "config.json", config_of(FFN, moe(), d_model=64))
    (tmp_path / "recipe.toml").write_text(
        f'run_dir = "run"\n[model]\nconfig = "{tmp_path}/config.json"\ninit = "random"\n'
        "[data]\nseq_len = 16\n[train]\nbatch_size = 16\nsteps = 50\n[mesh]\nfsdp = 3\n"
    )
    words = ["plan", "--train", str(tmp_path / "recipe.toml"), "--json"]
    found = {}
    for mesh in ("fsdp=8", "data=8"):
        assert cli.main([*words, "--mesh", mesh, "--platform", "h100"]) == 0
        found[mesh] = json.loads(capsys.readouterr().out)["training"]
    assert found["fsdp=8"]["total"] < found["data=8"]["total"]
    assert "all-gather" in found["fsdp=8"]["sent"] and "all-gather" not in found["data=8"]["sent"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "fsdp=8"], "--mesh with --train: only with --platform"),
        (["--mesh", "fdsp=8", "--platform", "v5p"], "unknown mesh axis 'fdsp' (did you mean 'fsdp'?)"),
        (["--mesh", "fsdp=0", "--platform", "v5p"], "fsdp=0 must be at least 1"),
        (["--mesh", "fsdp=3", "--platform", "v5p"], "make it a multiple of 3"),
        (["--mesh", "fsdp=8", "--platform", "v5p:2x2x1"], "does not fit 4 devices"),
        (["--mesh", "fsdp=1,sequence=3", "--platform", "v5p"], "is not divisible by mesh.sequence"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(tmp_path, words, message, capsys):
    write_config(tmp_path / "config.json", config_of(FFN))
    (tmp_path / "recipe.toml").write_text(
        f'run_dir = "run"\n[model]\nconfig = "{tmp_path}/config.json"\ninit = "random"\n[train]\nbatch_size = 16\n'
    )
    assert cli.main(["plan", "--train", str(tmp_path / "recipe.toml"), *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert message in line


def test_a_parameter_that_an_axis_does_not_divide_is_named():
    config = config_of(FFN, d_model=20)
    with pytest.raises(InputError, match="20.* is .* axis fsdp=8"):
        planned_training(recipe_of(mesh=MeshSection(fsdp=8), batch_size=8), config, "v5p", compiles=False)
