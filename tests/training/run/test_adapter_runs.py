"""Training on an adapter directory: what is frozen stays, bit for bit, and what is left refers to the same base."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.distributed.sharding import path_name
from moe_jax.experts.shapes import LoRAConfig
from moe_jax.model_io.adapter_dir import AdapterDirectoryWriter
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.tuned_base import own_leaves
from moe_jax.models import LayerConfig
from moe_jax.peft.adapt import initial_leaves
from moe_jax.training.program import initial_states, make_program
from moe_jax.training.recipe import ModelSection
from tests.support.dense_models import random_leaves, write_model
from tests.support.tiers import long
from tests.support.training_models import FFN, config_of, recipe_of

RECIPE = """
run_dir = "run"
[model]
path = "tuned"
[data]
seq_len = 16
sources = [{ path = "text.txt" }]
[partition]
train = [".*/q/lora/.*", "final_norm/.*"]
[optimizer]
learning_rate = 1e-2
[train]
steps = 2
batch_size = 8
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tokenizer_path) -> Path:
    """A bfloat16 model in `dense`, and `tuned`: LoRA over its NF4 kernels."""
    folder = tmp_path_factory.mktemp("adapters")
    config = config_of(FFN, dtype="bfloat16")
    dense = ModelDirectory(write_model(folder / "dense", config, random_leaves(config), (tokenizer_path,)))
    lora = LoRAConfig(rank=2, targets=("q", "v"), dropout=0.1)
    attention = dataclasses.replace(config.layers[0].attention, nf4=True, lora=lora)
    layer = LayerConfig(attention=attention, mlp=dataclasses.replace(FFN, nf4=True))
    tuned = dataclasses.replace(config, layers=(layer,), frozen_base=True)
    entry = {"command": "adapt", "options": {}, "sources": []}
    files = dense.tokenizer_files
    with AdapterDirectoryWriter(folder / "tuned", tuned, base=dense, tokenizer_files=files, lineage=[entry]) as writer:
        writer.write(dict(initial_leaves(tuned, 0)))
    (folder / "text.txt").write_text("".join(f"the {i}th line says {i * i} and {i % 7}\n" for i in range(100)))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


@long
def test_a_run_and_its_continuation_leave_an_adapter_directory(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    before, losses = open_source(Path("tuned")), []
    for arguments in ((), ("--set", "train.steps=3", "--resume")):
        assert cli.main(["train", "recipe.toml", *arguments]) == 0
        after = open_source(Path("run/model"))
        losses.append(json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["loss"])
        changed = {path for path in before.specs() if before.read(path).tobytes() != after.read(path).tobytes()}
        lora = {path for path in own_leaves(before.config) if "/q/lora/" in path}
        assert len(lora) == 2 and changed == lora | {"final_norm/scale"}
        # All that the base has not, trained or not, and what was trained of the base.
        assert after.own_specs().keys() == own_leaves(before.config) | {"final_norm/scale"}
    assert "continuing after step 2" in capsys.readouterr().out and np.isfinite(losses).all()
    assert after.base.path == workplace / "dense"
    assert json.loads(Path("run/model/base.json").read_text())["path"] == "../../dense"
    assert after.read("layers/0/attention/q/nf4/scales").dtype == np.float32
    saved = open_source(Path("run@3"))
    assert saved.own_specs().keys() == after.own_specs().keys() and saved.base.path == after.base.path
    assert all(saved.read(path).tobytes() == after.read(path).tobytes() for path in after.specs())
    for model, out in (("run@3", "merged"), ("run/model", "merged-model")):
        assert cli.main(["merge", model, out]) == 0
    assert ModelDirectory(Path("merged")).fingerprint() == ModelDirectory(Path("merged-model")).fingerprint()
    entries = json.loads(Path("run/model/lineage.json").read_text())
    assert [entry["command"] for entry in entries] == ["adapt", "train"]
    assert entries[-1]["sources"] == [{"path": "tuned", "fingerprint": before.fingerprint()}]
    assert [file.name for file in after.tokenizer_files] == ["tokenizer.json"]


def test_frozen_parameters_have_no_optimizer_state_and_keep_their_dtype(workplace):
    source = open_source(workplace / "tuned")

    def recipe_and_program(frozen_dtype):
        recipe = recipe_of(model=ModelSection(path=str(source.path), frozen_dtype=frozen_dtype))
        return recipe, make_program(recipe, source.config)

    recipe, program = recipe_and_program(None)
    trained = sum(np.prod(leaf_specs(source.config)[path].shape) for path in own_leaves(source.config))
    assert sum(leaf.size for leaf in jax.tree.leaves(program.state.params)) == trained
    # Adam's two moments and scalars, and nothing else.
    moments = [leaf for leaf in jax.tree.leaves(program.state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * trained
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program, recipe, source)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for state, dtype in (
        (frozen, "bfloat16"),
        (program.frozen, "bfloat16"),
        (recipe_and_program("float32")[1].frozen, "float32"),
    ):
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            *_, kind, name = path_name(path).split("/")
            nf4 = {"codes": "uint8", "scale_codes": "uint8"}.get(name, "float32")
            assert leaf.dtype == (nf4 if kind == "nf4" else dtype), path
