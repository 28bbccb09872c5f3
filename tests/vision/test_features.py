"""Features in the place of pixels: the same model, the same training, with the tower left out."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.data.sections import DataSection
from moe_jax.experts.shapes import FFNConfig
from moe_jax.images.feature_cache import digest_of
from moe_jax.model_io.frozen_tower import FrozenTower
from moe_jax.model_io.in_memory import DecoderLeaves, ModelInMemory
from moe_jax.model_io.loading import load_model
from moe_jax.nn import Decoder
from moe_jax.training.in_memory_training import read_batch, train_on_batches
from moe_jax.training.program import abstract_batch, check_pictures_of_teacher, draw_model, make_program
from moe_jax.training.recipe import (
    DistillSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PartitionSection,
    TrainSection,
)
from tests.support.dense_models import random_leaves
from tests.support.moe_models import MemorySource
from tests.support.numerics import logits_of
from tests.support.seeing_models import FEATURES, picture_batch, seeing, tower_config
from tests.support.tiers import long, one_in
from tests.support.training_models import config_of, moe, recipe_of

CONFIG = seeing(config_of(moe(balance_coef=0.0)), tower=tower_config(layers=2))
SOURCE = MemorySource(CONFIG, random_leaves(CONFIG))
LENGTH = 24
PLACES = ((), (2,), (0, 12), (11,), (3, 13), (), (5,), (0, 14))


@pytest.fixture(scope="module")
def tower():
    return FrozenTower(SOURCE)


def batch_of(seed=0, *, tower=None):
    """A batch with pixels, or with what the tower makes of them."""
    batch = picture_batch(CONFIG, LENGTH, *PLACES, seed=seed)
    if tower is None:
        return batch
    digests = [digest_of(pixels.tobytes()) for row in batch["pixels"] for pixels in row]
    return tower.fill(batch | {"digests": np.stack(digests).reshape(*batch["pixels"].shape[:2], 32)})


def test_a_call_with_features_is_the_call_with_pixels(tower):
    model, batches = load_model(SOURCE), (batch_of(), batch_of(tower=tower))
    given = [{name: one[name] for name in ("pixels", "features", "slots") if name in one} for one in batches]
    found = [logits_of(model, batches[0]["tokens"], **one) for one in given]
    np.testing.assert_allclose(*found, atol=1e-5)
    np.testing.assert_allclose(
        nnx.jit(lambda model, features: model.see(features=features))(model, batches[1]["features"]),
        nnx.jit(lambda model, pixels: model.see(pixels))(model, batches[0]["pixels"]),
        atol=1e-5,
    )


def losses(axes, *, accumulation=1, tower=None, compute_dtype="float32"):
    recipe = recipe_of(
        seq_len=LENGTH,
        model=ModelSection(config="config.json", init="random", compute_dtype=compute_dtype),
        mesh=MeshSection(**({"fsdp": 1} | axes)),
        train=TrainSection(steps=3, batch_size=8, accumulation=accumulation),
        optimizer=OptimizerSection(learning_rate=1e-2),
    )
    devices, found = jax.devices()[: int(np.prod(list(axes.values()), dtype=int))], []
    batches = [batch_of(seed, tower=tower) for seed in range(3)]
    note = lambda record: found.append([record["loss"], record["grad_norm"]])  # noqa: E731
    train_on_batches(recipe, types.SimpleNamespace(config=CONFIG), batches, devices=devices, on_step=note)
    return np.array(found)


@pytest.fixture(scope="module")
def drawn_tower():
    """The tower of the model that training draws."""
    return FrozenTower(ModelInMemory(CONFIG, DecoderLeaves(draw_model(CONFIG, recipe_of().seed))))


@long  # test_picture_training compares whole runs
def test_steps_with_features_have_the_losses_of_those_with_pixels(drawn_tower):
    with_pixels, with_features = losses({}), losses({}, tower=drawn_tower)
    np.testing.assert_allclose(with_features[:, 0], with_pixels[:, 0], atol=1e-6)
    np.testing.assert_allclose(with_features[:, 1], with_pixels[:, 1], rtol=1e-4)
    assert drawn_tower.computed == 3 * 16


@long
@pytest.mark.parametrize(("axes", "accumulation"), [({"fsdp": 2, "expert": 2, "tensor": 2}, 1), ({"data": 2}, 2)])
def test_features_are_divided_over_a_mesh_and_into_microbatches(drawn_tower, axes, accumulation):
    found = losses(axes, accumulation=accumulation, tower=drawn_tower)
    np.testing.assert_allclose(found, losses({}, tower=drawn_tower), atol=1e-4)


def test_features_of_another_dtype_are_cast_to_that_of_activations():
    model = load_model(SOURCE, compute_dtype="bfloat16")
    features = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, FEATURES, 16)), jnp.bfloat16)
    one, other = (model.see(features=given) for given in (features, features.astype(jnp.float32)))
    assert one.dtype == other.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


FEATURES_OF = {"features": np.zeros((8, 2, FEATURES, 16), np.float32)}


@one_in(2)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (FEATURES_OF, "together"),
        ({"pixels": None, **FEATURES_OF, "slots": None}, "features alone"),
        ({"pixels": None, "features": np.zeros((8, 2, FEATURES, 16), np.uint8)}, "expected float [B, M, n, w]"),
        ({"pixels": None, "features": np.zeros((8, 2, FEATURES, 17), np.float32)}, f"float[8, M, {FEATURES}, 16]"),
        ({"pixels": None, "features": np.zeros((7, 2, FEATURES, 16), np.float32)}, f"float[8, M, {FEATURES}, 16]"),
        ({"pixels": None, "features": np.zeros((8, 1, FEATURES, 16), np.float32)}, "1 pictures have 9"),
    ],
)
def test_batches_that_do_not_fit_are_refused(changes, named):
    batch = batch_of() | changes
    with pytest.raises(InputError) as error:
        read_batch({name: array for name, array in batch.items() if array is not None}, CONFIG)
    assert named in str(error.value) and "\n" not in str(error.value)


@long
def test_a_call_takes_pixels_or_features_with_slots():
    model, batch = Decoder(CONFIG, rngs=nnx.Rngs(0)), batch_of()
    tokens, slots = batch["tokens"], batch["slots"]
    for given in ({**FEATURES_OF}, {"slots": slots}, {"pixels": batch["pixels"]}):
        with pytest.raises(InputError, match="go together"):
            model(tokens, **given)
    with pytest.raises(InputError, match="one of both"):
        model(tokens, slots=slots, pixels=batch["pixels"], **FEATURES_OF)
    with pytest.raises(InputError, match="features"):
        model(tokens, slots=slots, features=np.zeros((8, 2, FEATURES, 15), np.float32))
    blind = Decoder(config_of(FFNConfig(dim=32)), rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match="takes no pictures"):
        blind(tokens, slots=slots, **FEATURES_OF)


def distilling(**sections):
    section = DistillSection(teacher="teacher")
    return recipe_of(distill=section, partition=PartitionSection(train=(".*/router/.*",)), seq_len=LENGTH, **sections)


def test_a_teacher_sees_the_pictures_of_the_model():
    def refused(teacher, *, aspect=None, features=False):
        recipe = dataclasses.replace(distilling(), data=DataSection(seq_len=LENGTH, image_aspect=aspect))
        try:
            check_pictures_of_teacher(recipe, CONFIG, teacher, features=features)
        except InputError as error:
            return str(error)
        return ""

    def processed(**changes):
        processing = dataclasses.replace(CONFIG.vision.processing, **changes)
        return dataclasses.replace(CONFIG, vision=dataclasses.replace(CONFIG.vision, processing=processing))

    blind, finer = dataclasses.replace(CONFIG, vision=None), seeing(CONFIG, tower=tower_config(patch=2))
    assert not refused(CONFIG) and not refused(CONFIG, features=True) and not refused(blind)
    assert "36 tokens of a picture" in refused(finer)
    program = make_program(distilling(), CONFIG, jax.devices()[:1], teacher=finer)
    given = program.state, program.frozen
    with jax.set_mesh(program.mesh):
        jax.eval_shape(program.step, *given, abstract_batch(distilling(), CONFIG, program.mesh), program.taught)
        seen = abstract_batch(distilling(), CONFIG, program.mesh, pictures=1)
        with pytest.raises(InputError, match="36 tokens"):
            jax.eval_shape(program.step, *given, seen, program.taught)
    for changes in ({"shortest": 14}, {"resample": "bilinear"}, {"pad": True}):
        assert next(iter(changes)) in refused(processed(**changes))
    assert "data.image_aspect" in refused(CONFIG, aspect="pad") and not refused(processed(pad=True), aspect="pad")
    # Each normalises pixels in its own way; features are made with one of them, and so is what is padded.
    whiter = {"mean": (0.9, 0.9, 0.9)}
    assert not refused(processed(**whiter)) and "mean" in refused(processed(**whiter), features=True)
    assert "mean" in refused(processed(**whiter, pad=True), aspect="pad")


def test_features_of_the_model_are_no_other_tower_s(tower):
    kernel = "vision/tower/layers/0/mlp/up/kernel"
    leaves = dict(SOURCE.leaves) | {kernel: SOURCE.leaves[kernel] * 2}
    with pytest.raises(InputError, match="another tower"):
        train_on_batches(
            distilling(), SOURCE, [batch_of(tower=tower)], devices=jax.devices()[:1],
            teacher=MemorySource(CONFIG, leaves),
        )  # fmt: skip


@long
def test_features_are_refused_where_the_tower_is_trained(tower):
    recipe = recipe_of(seq_len=LENGTH, partition=PartitionSection(train=(".*",)))
    with pytest.raises(InputError, match="partition.train"):
        train_on_batches(recipe, SOURCE, [batch_of(tower=tower)], devices=jax.devices()[:1])
    with pytest.raises(InputError, match="partition.train"):
        make_program(recipe, CONFIG, pictures=1, features=True)
    program = make_program(recipe_of(seq_len=LENGTH), CONFIG, pictures=2, features=True)
    batch = abstract_batch(recipe, CONFIG, program.mesh, pictures=2, features=True)
    assert batch["features"].shape == (8, 2, FEATURES, 16) and "pixels" not in batch
