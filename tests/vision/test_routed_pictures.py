"""Features of pictures are tokens to the routers: balance, loads and capacity count them."""

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.model_io.loading import load_model
from moe_jax.nn.moe import stats_per_layer
from tests.support.dense_models import random_leaves
from tests.support.moe_models import MemorySource
from tests.support.seeing_models import FEATURES, picture_batch, pictures, seeing
from tests.support.training_models import config_of, moe

LENGTH, PLACES = 20, ((2,), (0, 10), ())
CONFIG = seeing(config_of(moe(balance_choices="first", capacity_factor=0.6, capacity_rows=3)))


@pytest.fixture(scope="module")
def computed():
    """What routers decide for a batch whose last tokens of every row are padding, in training and otherwise."""
    model = load_model(MemorySource(CONFIG, random_leaves(CONFIG)))
    batch = picture_batch(CONFIG, LENGTH, *PLACES)
    segments = np.ones((3, LENGTH), np.int32)
    segments[:, -1] = 0

    @nnx.jit
    def run(model, pixels, key):
        given = {"tokens": batch["tokens"], "slots": batch["slots"], "segment_ids": segments}
        out = model.activations(**given, pixels=pixels, routing=True, key=key)
        stats = stats_per_layer(model.config, out.router)[0]
        return out.routing[0], stats, model.auxiliary_loss(out)

    return batch["slots"], [
        run(model, pixels, key) for pixels, key in (
            (batch["pixels"], None), (batch["pixels"], jax.random.key(0)), (pictures(3, 2, seed=9), None)
        )
    ]  # fmt: skip


def test_loads_and_the_balance_loss_count_features(computed):
    slots, ((routing, stats, loss), _, (_, other, other_loss)) = computed
    experts, valid = np.asarray(routing.experts), np.arange(LENGTH) < LENGTH - 1
    counted = experts[:, valid]
    np.testing.assert_allclose(stats.load, np.bincount(counted.reshape(-1), minlength=4) / counted.size, atol=1e-6)
    first = np.bincount(counted[..., 0].reshape(-1), minlength=4) / counted[..., 0].size
    np.testing.assert_allclose(stats.balanced_load, first, atol=1e-6)
    assert float(stats.tokens) == 3 * (LENGTH - 1)
    # Other pictures, other loads and another loss, of the same texts.
    assert np.abs(np.asarray(stats.balanced_load - other.balanced_load)).max() > 0.01
    assert abs(float(loss - other_loss)) > 1e-5
    assert (slots > 0).sum() == 3 * FEATURES and (experts[slots > 0] >= 0).sum() > 0


def test_features_take_room_of_a_capacity(computed):
    slots, ((free, free_stats, _), (limited, stats, _), _) = computed
    assert float(free_stats.dropped) == 0
    everywhere = np.asarray(free.experts)
    lost = (np.asarray(limited.experts) < 0) & (everywhere >= 0)
    assert lost[slots > 0].any() and lost[slots == 0].any()
    capacity = int(np.ceil(3 * LENGTH / 4 * 0.6 * 2))
    kept = np.bincount(np.asarray(limited.experts)[np.asarray(limited.experts) >= 0], minlength=4)
    assert kept.max() <= capacity and float(stats.dropped) > 0
