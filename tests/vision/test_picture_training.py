"""Training on pictures by a recipe: with and without kept features, going on, the tower as it was, a mesh."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.pipeline import open_data
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.images.decoding import decode_picture
from moe_jax.images.processing import pixels_of
from moe_jax.model_io.frozen_tower import FrozenTower
from moe_jax.model_io.loading import load_model, model_leaves
from moe_jax.training.metrics import read_metrics
from moe_jax.training.saved_model import trained_config
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves
from tests.support.moe_models import MemorySource
from tests.support.numerics import logits_of
from tests.support.seeing_models import FEATURES, seeing
from tests.support.tiers import long
from tests.support.training_models import recipe_of
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


@long  # of texts `training/run/test_runs.py` has one
@pytest.mark.parametrize("cached", [False, True], ids=["pixels", "features"])
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


@long
def test_held_out_conversations_are_scored_with_their_pictures(folder, whole):
    """Packed rows have the losses of their conversations alone, and other pictures have others."""
    model, path = moe_jax.load(whole / "model"), folder / "a.jsonl"
    found = moe_jax.evaluate(model, path, batch_size=8)
    section = DataSection(sources=(SourceSection(path=str(path)),), seq_len=32, prefetch=0, epochs=1)
    packed = open_data(section, model.config, whole / "model" / "tokenizer.json", seed=0, batch_size=12, rows=range(12))
    batch = next(packed)
    assert batch["segment_ids"].max() == 2 and not next(packed)["segment_ids"].any()
    total = float(model.decoder.loss(batch)) * batch["weights"].sum()
    assert found.windows == 20 and found.tokens == batch["weights"].sum()
    assert found.total_nll == pytest.approx(total, rel=1e-6)
    write(folder / "others.jsonl", [llava((n + 1) % 20, answer=str(n)) for n in range(20)])
    assert moe_jax.evaluate(model, folder / "others.jsonl").nll != pytest.approx(found.nll, rel=1e-3)


@long
def test_a_model_without_a_token_for_pictures_is_asked_as_it_was_trained(folder, whole, capsys):
    model, picture = moe_jax.load(whole / "model"), folder / "shop" / "3.png"
    answer = moe_jax.generate(model, "<image>\nq", image=picture, max_new_tokens=4)
    ids = [0] * FEATURES + list(b"\nq")
    assert answer.prompt_ids == ids
    slots = np.array([[*range(1, FEATURES + 1), 0, 0]], np.int32)
    pixels = pixels_of(decode_picture(png(3), "3.png"), CONFIG.vision.processing)[None, None]
    logits = logits_of(model.decoder, np.array([ids], np.int32), pixels=pixels, slots=slots)
    assert int(logits[0, -1].argmax()) == answer.ids[0]
    words = ["--prompt", "<image>\nq", "--image", str(picture), "--max-new-tokens", "4", "--json"]
    capsys.readouterr()
    assert cli.main(["generate", str(whole / "model"), *words]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ids"] == answer.ids
    with pytest.raises(InputError, match="placeholders"):
        moe_jax.generate(model, "q", image=picture)
    # Without pictures, it is text.
    assert moe_jax.generate(model, "<image>", max_new_tokens=1).prompt_ids == list(b"<image>")


def test_pictures_are_shown_as_in_training_afterwards():
    config = seeing(dense_config())
    for aspect, pad in (("pad", True), ("square", False), (None, config.vision.processing.pad)):
        recipe = recipe_of()
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, image_aspect=aspect))
        assert trained_config(config, recipe).vision.processing.pad == pad
