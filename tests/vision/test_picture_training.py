"""Training on pictures by a recipe: with and without kept features, going on, the tower as it was, a mesh."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.model_io.frozen_tower import FrozenTower
from moe_jax.model_io.loading import load_model, model_leaves
from moe_jax.training.metrics import read_metrics
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves
from tests.support.moe_models import MemorySource
from tests.support.seeing_models import seeing
from tests.support.tiers import long
from tests.vision.test_picture_data import llava, png, write

CONFIG = seeing(dense_config(vocab_size=258, num_layers=2))
RECIPE = """
run_dir = "RUN"
[model]
path = "MODEL"
[data]
seq_len = 32
epochs = 5
chat_template = "llava-v1"
[[data.sources]]
path = "FOLDER/a.jsonl"
[train]
steps = 6
batch_size = 8
[optimizer]
learning_rate = 1e-2
[checkpoint]
every = 2
[log]
every = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Twenty pictures, a conversation about each, and a model that sees."""
    made = tmp_path_factory.mktemp("world")
    (made / "shop").mkdir()
    for number in range(20):
        (made / "shop" / f"{number}.png").write_bytes(png(number))
    write(made / "a.jsonl", [llava(n, answer=str(n)) for n in range(20)])
    moe_jax.save(moe_jax.Model(load_model(MemorySource(CONFIG, random_leaves(CONFIG)))), made / "model")
    byte_tokenizer(made / "model" / "tokenizer.json")
    (made / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (made / "template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    return made


def trained(folder: Path, run: Path, *settings: str, resume: bool = False) -> list[float]:
    """Trains by the command; returns the losses."""
    recipe = run.with_suffix(".toml")
    text = RECIPE.replace("RUN", str(run)).replace("MODEL", f"{folder}/model").replace("FOLDER", str(folder))
    recipe.write_text(text.replace("llava-v1", f"{folder}/template.jinja"))
    told = ["--resume"] if resume else []
    assert cli.main(["train", str(recipe), *told, *(one for setting in settings for one in ("--set", setting))]) == 0
    return losses_of(run)


def losses_of(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def leaves_of(run: Path) -> dict[str, bytes]:
    return {path: np.asarray(leaf).tobytes() for path, leaf in model_leaves(moe_jax.load(run / "model").decoder)}


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    losses = trained(folder, run)
    assert len(losses) == 6 and losses[-1] < losses[0]
    return run


def test_the_tower_stays_as_it_was_and_the_projector_learns(folder, whole):
    before, after = leaves_of(folder), leaves_of(whole)
    changed = {path for path in before if before[path] != after[path]}
    assert not [path for path in changed if path.startswith("vision/tower/")]
    assert "vision/projector/0/kernel" in changed and "layers/1/mlp/up/kernel" in changed


@pytest.mark.parametrize("cached", [pytest.param(False, marks=long, id="pixels"), pytest.param(True, id="features")])
def test_a_run_goes_on_bit_for_bit(folder, tmp_path, cached):
    settings = [f"data.feature_cache={tmp_path / 'cache'}"] if cached else []
    once = trained(folder, tmp_path / "once", *settings)
    for steps in (3, 6):
        told = (*settings, f"train.steps={steps}", "schedule.steps=6")
        twice = trained(folder, tmp_path / "twice", *told, resume=steps > 3)
    assert once == twice
    assert leaves_of(tmp_path / "once") == leaves_of(tmp_path / "twice")


def test_the_tower_looks_at_each_picture_once(folder, whole, tmp_path, monkeypatch):
    towers = []
    seen = FrozenTower._seen
    monkeypatch.setattr(FrozenTower, "_seen", lambda self, pixels: towers.append(len(pixels)) or seen(self, pixels))
    cache = f"data.feature_cache={tmp_path / 'cache'}"
    losses = trained(folder, tmp_path / "run", cache)
    assert sum(towers) == 20
    np.testing.assert_allclose(losses, losses_of(whole), rtol=1e-5)
    # Another run finds them.
    assert trained(folder, tmp_path / "again", cache) == losses and sum(towers) == 20


def test_a_trained_tower_has_no_features_to_keep(folder, tmp_path, capsys):
    recipe = tmp_path / "a.toml"
    text = RECIPE.replace("RUN", str(tmp_path / "run")).replace("MODEL", f"{folder}/model")
    recipe.write_text(text.replace("FOLDER", str(folder)) + '\n[partition]\ntrain = ["vision/.*"]\n')
    assert cli.main(["train", str(recipe), "--set", f"data.feature_cache={tmp_path / 'cache'}"]) == 2
    assert "is trained, and a batch has features" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@long
def test_eight_devices_as_one(folder, whole, tmp_path):
    assert jax.device_count() == 8
    losses = trained(folder, tmp_path / "run", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    np.testing.assert_allclose(losses, losses_of(whole), rtol=1e-5)
