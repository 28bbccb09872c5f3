"""A language model gets an eye: its own weights, the encoder's and a projector, and it learns and is exported."""

import dataclasses

import numpy as np
import pytest

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.images.image_config import ImageProcessing
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.numerics import logits_of
from tests.support.seeing_models import picture_batch, tower_config
from tests.support.tiers import one_in

PROCESSING = ImageProcessing(size=(12, 12), shortest=12)


@pytest.fixture
def paths(tmp_path):
    """A language model and an image encoder on the disk, whose last norm the features of a model do not pass."""
    text, tower = dense_config(num_layers=2), tower_config()
    patches = dataclasses.replace(tower.patches, pooled_norm=False)
    tower = dataclasses.replace(tower, final_norm=True, patches=patches)
    return [
        write_model(tmp_path / name, config, random_leaves(config)) for name, config in (("lm", text), ("clip", tower))
    ]


def test_weights_are_those_of_both_and_the_rest_is_drawn(paths, tmp_path):
    made = moe_jax.give_eye(*paths, tmp_path / "seeing", processing=PROCESSING, seed=3, placeholder=5)
    found, text, tower = (ModelDirectory(path) for path in (tmp_path / "seeing", *paths))
    assert found.config.vision.placeholder == 5 and found.config.vision.features == (-2,)
    for path in found.specs():
        if path.startswith("vision/tower/"):
            name = path.removeprefix("vision/tower/").replace("pooled_norm", "final_norm")
            np.testing.assert_array_equal(found.read(path), tower.read(name))
        elif not path.startswith("vision/"):
            np.testing.assert_array_equal(found.read(path), text.read(path))
    drawn = {path: found.read(path) for path in found.specs() if path.startswith("vision/projector/")}
    assert sorted(drawn) == [f"vision/projector/{i}/{name}" for i in (0, 2) for name in ("bias", "kernel")]
    assert drawn["vision/projector/0/kernel"].std() > 0.01
    entry = made.lineage[-1]
    assert entry["command"] == "give-eye" and len(entry["sources"]) == 2 and entry["options"]["seed"] == 3
    other = moe_jax.give_eye(*paths, processing=PROCESSING, seed=4)
    assert not np.array_equal(other.source.read("vision/projector/0/kernel"), drawn["vision/projector/0/kernel"])
    batch = picture_batch(found.config, 16, (2,), ())
    logits = logits_of(made.decoder, batch["tokens"], pixels=batch["pixels"], slots=batch["slots"])
    assert np.isfinite(np.asarray(logits)).all()
    # A row without pictures is what the language model makes of it.
    alone = logits_of(moe_jax.load(paths[0]).decoder, batch["tokens"][1:])
    np.testing.assert_allclose(logits[1:], alone, atol=1e-5)


@one_in(2)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"projector": ("linear", "gelo", "linear")}, "gelo"),
        ({"features": (9,)}, "features"),
        ({"processing": ImageProcessing(size=(2, 2))}, "patches"),
    ],
)
def test_parts_that_do_not_fit_are_refused(paths, tmp_path, options, named):
    with pytest.raises(InputError, match=named):
        moe_jax.give_eye(*paths, tmp_path / "seeing", **{"processing": PROCESSING, **options})
    assert not (tmp_path / "seeing").exists()


def test_models_of_other_kinds_are_refused(paths, tmp_path):
    text, tower = paths
    with pytest.raises(InputError, match="image encoder"):
        moe_jax.give_eye(text, text)
    with pytest.raises(InputError, match="language model"):
        moe_jax.give_eye(tower, tower)
    seeing = moe_jax.give_eye(text, tower, processing=PROCESSING)
    with pytest.raises(InputError, match="sees already"):
        moe_jax.give_eye(seeing, tower)
