"""A model that sees computes the same over a mesh as on one device, packed or not, and trains alike."""

import types

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import local_rows, make_mesh, path_name, place, state_shardings
from moe_jax.experts.shapes import FFNConfig
from moe_jax.model_io.loading import load_model
from moe_jax.nn import Decoder
from moe_jax.training.in_memory_training import read_batch, train_on_batches
from moe_jax.training.recipe import MeshSection, OptimizerSection, TrainSection
from tests.support.dense_models import random_leaves
from tests.support.moe_models import MemorySource
from tests.support.numerics import assert_close, logits_of
from tests.support.seeing_models import FEATURES, picture_batch, pictures, seeing, slots_of, tower_config
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of

CONFIG = seeing(config_of(FFNConfig(dim=32), moe()))
# Compiles in half the time; with auxiliary losses, microbatches run the model twice.
TRAINED = seeing(config_of(moe(balance_coef=0.0)), tower=tower_config(layers=2))
LENGTH = 32
# Rows of a batch with no picture, one, and more; two of them touch.
PLACES = ((), (2,), (0, 9), (11,), (3, 20), (), (23,), (0, 14))
MESHES = [
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"data": 2, "sequence": 2, "tensor": 2},
    {"fsdp": 4, "sequence": 2},
    {"data": 2, "expert": 4},
    {"tensor": 8},
    {"fsdp": 8},
    {"sequence": 8},
]


@pytest.fixture(scope="module")
def model():
    return load_model(MemorySource(CONFIG, random_leaves(CONFIG)))


@jax.jit
def computed(graphdef, state, batch):
    """Logits, loss, and gradients of all parameters."""
    pictured = {name: batch[name] for name in ("tokens", "pixels", "slots")}
    loss, gradients = jax.value_and_grad(lambda state: nnx.merge(graphdef, state).loss(batch))(state)
    return nnx.merge(graphdef, state)(**pictured).logits, loss, gradients


@pytest.fixture(scope="module")
def on_one_device(model):
    return computed(*nnx.split(model), picture_batch(CONFIG, LENGTH, *PLACES))


@long  # training on the second mesh shows it too
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_logits_loss_and_gradients_are_those_of_one_device(model, on_one_device, axes):
    mesh, batch = make_mesh(axes), picture_batch(CONFIG, LENGTH, *PLACES)
    graphdef, state = nnx.split(model)
    state = jax.device_put(state, state_shardings(state, mesh))
    rows = local_rows(mesh, len(PLACES))
    with jax.set_mesh(mesh):
        found = computed(graphdef, state, place(batch, rows, mesh, len(PLACES)))
    assert_close(found, on_one_device)
    # What is compared is not nothing, but for the last layer of the tower, which is not run.
    for path, leaf in jax.tree_util.tree_leaves_with_path(on_one_device[2]["vision"]):
        name = path_name(path)
        if name.endswith(("kernel", "positions")):
            assert (float(abs(leaf).max()) > 1e-3) != ("segments/1" in name), name


def trained(axes, accumulation):
    """The losses of three steps, and the parameters after them."""
    recipe = recipe_of(
        seq_len=LENGTH,
        mesh=MeshSection(**({"fsdp": 1} | axes)),
        train=TrainSection(steps=3, batch_size=8, accumulation=accumulation),
        optimizer=OptimizerSection(learning_rate=1e-2),
    )
    devices, losses = jax.devices()[: int(np.prod(list(axes.values()), dtype=int))], []
    batches = [picture_batch(TRAINED, LENGTH, *PLACES, seed=seed) for seed in range(3)]
    source = types.SimpleNamespace(config=TRAINED)
    note = lambda record: losses.append([record["loss"], record["aux_loss"], record["grad_norm"]])  # noqa: E731
    decoder, _ = train_on_batches(recipe, source, batches, devices=devices, on_step=note)
    return np.array(losses), jax.tree.map(np.asarray, nnx.state(decoder))


@pytest.fixture(scope="module")
def trained_on_one_device():
    return trained({}, 1)


@long
@pytest.mark.parametrize(("axes", "accumulation"), [(MESHES[1], 2), ({}, 4), (MESHES[0], 1)], ids=str)
def test_training_is_that_of_one_device(trained_on_one_device, axes, accumulation):
    (losses, state), (expected, after) = trained(axes, accumulation), trained_on_one_device
    np.testing.assert_allclose(losses, expected, atol=1e-4)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-3), state, after)


def test_documents_of_a_packed_row_are_computed_as_if_alone(model):
    # Documents of one row: two pictures, none, one. Slots count the pictures of the whole row.
    length, starts = 20, ((0, 11), (), (3,))
    batch = picture_batch(CONFIG, 3 * length, (0, 11, 2 * length + 3))
    given = {name: batch[name] for name in ("tokens", "pixels", "slots")}
    index = np.arange(3 * length)[None]
    packed = logits_of(model, **given, positions=index % length, segment_ids=index // length + 1)[0]
    picture = 0
    for document, places in enumerate(starts):
        part = slice(document * length, (document + 1) * length)
        # As many pictures for every one, so that one program computes them.
        pixels = np.roll(batch["pixels"], -picture, axis=1)[:, :2]
        slots = slots_of(CONFIG, length, places)
        alone = logits_of(model, batch["tokens"][:, part], pixels=pixels, slots=slots)[0]
        np.testing.assert_allclose(packed[part], alone, atol=1e-6)
        picture += len(places)


@long  # as documents of a packed row
def test_rows_of_a_batch_are_computed_as_if_alone(model):
    batch = picture_batch(CONFIG, LENGTH, *PLACES)
    given = {name: batch[name] for name in ("tokens", "pixels", "slots")}
    together = logits_of(model, **given)
    for row in range(4):
        alone = logits_of(model, **{name: array[row : row + 1] for name, array in given.items()})[0]
        np.testing.assert_allclose(alone, together[row], atol=1e-5)
    # A row without pictures is the text alone.
    np.testing.assert_allclose(logits_of(model, batch["tokens"][:1])[0], together[0], atol=1e-5)


@long
def test_what_no_slot_names_does_nothing(model):
    batch = picture_batch(CONFIG, 12, (1,))
    more = np.concatenate([batch["pixels"], pictures(1, 2, seed=5)], axis=1)
    one, other = (logits_of(model, batch["tokens"], pixels=p, slots=batch["slots"]) for p in (batch["pixels"], more))
    np.testing.assert_allclose(one, other, atol=1e-6)
    assert FEATURES == (batch["slots"] > 0).sum()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pixels": None}, "slots alone"),
        ({"slots": None}, "pixels alone"),
        ({"pixels": np.zeros((2, 1, 12, 12, 3), np.float32)}, "uint8"),
        ({"pixels": np.zeros((2, 1, 12, 16, 3), np.uint8)}, "12, 12, 3"),
        ({"pixels": np.zeros((1, 1, 12, 12, 3), np.uint8)}, "uint8[2, M"),
        ({"pixels": np.zeros((2, 12, 12, 3), np.uint8)}, "[B, M, H, W, 3]"),
        ({"slots": np.full((2, 12), 10)}, "9 features"),
        ({"slots": np.full((2, 12), -1)}, "from -1"),
        ({"slots": np.zeros((2, 11), int)}, "slots of a batch"),
        ({"slots": np.zeros((2, 12))}, "expected integers"),
    ],
)
def test_batches_that_do_not_fit_are_refused(changes, named):
    batch = picture_batch(CONFIG, 12, (0,), (3,)) | changes
    with pytest.raises(InputError) as error:
        read_batch({name: array for name, array in batch.items() if array is not None}, CONFIG)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_pictures_for_a_model_that_takes_none_are_refused():
    batch = picture_batch(CONFIG, 12, (0,))
    blind = config_of(FFNConfig(dim=32))
    with pytest.raises(InputError, match="pixels"):
        read_batch(batch, blind)
    with pytest.raises(InputError, match="takes no pictures"):
        Decoder(blind, rngs=nnx.Rngs(0))(batch["tokens"], pixels=batch["pixels"], slots=batch["slots"])
