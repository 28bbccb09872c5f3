"""How often experts are chosen on a text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.evaluation.held_out import measure_router_statistics
from moe_jax.functional.routing.route import route
from moe_jax.nn import Decoder, load_per_layer
from moe_jax.nn import moe as moe_module
from tests.support.numerics import initialised
from tests.support.tiers import long
from tests.support.training_models import config_of, moe
from tests.training.test_step import PLAIN


@pytest.fixture(scope="module")
def model():
    return initialised(lambda: Decoder(config_of(*[PLAIN, moe(expert=PLAIN)] * 2), rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 256, 41).astype(np.int32)


@pytest.fixture(scope="module")
def of_windows(model, ids) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Of every window on its own, by layer: the load of all, and the logits of every token, as the routers get them."""
    found, load = [], {1: np.zeros(4), 3: np.zeros(4)}

    @nnx.jit
    def run(model, tokens):
        return model(tokens).router

    def recording(logits, *args, **kwargs):
        jax.debug.callback(lambda array: found.append(np.asarray(array)), logits, ordered=True)
        return route(logits, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_module, "route", recording)
        for window in (ids[:16], ids[16:32], ids[32:]):
            for layer, share in load_per_layer(model.config, run(model, jnp.asarray(window)[None])).items():
                load[layer] += len(window) * np.asarray(share) / len(ids)
        jax.effects_barrier()
    return load, {1: np.concatenate(found[0::2]), 3: np.concatenate(found[1::2])}


@long
def test_the_load_is_that_of_every_window_on_its_own_on_every_mesh(model, ids, of_windows):
    expected, _ = of_windows
    for mesh in (make_mesh({}, jax.devices()[:1]), make_mesh({"fsdp": -1})):
        found = measure_router_statistics(model, ids, seq_len=16, batch_size=2, mesh=mesh)
        assert found.keys() == expected.keys()
        for layer, statistics in found.items():
            share = statistics.usage
            np.testing.assert_allclose(share, expected[layer], atol=1e-6)
            assert share.sum() == pytest.approx(1.0) and np.ptp(share) > 0.01


def test_windows_of_one_token_are_refused(model, ids):
    with pytest.raises(InputError, match="seq_len = 1 must .* least 2"):
        measure_router_statistics(model, ids, seq_len=1, batch_size=1, mesh=make_mesh({}, jax.devices()[:1]))


def test_statistics_are_those_of_all_tokens_whatever_the_batch(model, ids, of_windows):
    _, expected = of_windows
    mesh = make_mesh({}, jax.devices()[:1])
    by_batch = [measure_router_statistics(model, ids, seq_len=16, batch_size=size, mesh=mesh) for size in (1, 2)]
    for layer, logits in expected.items():
        usage, score, similarity = by_batch[0][layer]
        assert logits.shape == (41, 4) and usage.sum() == pytest.approx(1)
        np.testing.assert_allclose(score, np.mean(jax.nn.softmax(logits, axis=-1), axis=0), atol=1e-6)
        norms = np.linalg.norm(logits, axis=0)
        np.testing.assert_allclose(similarity, logits.T @ logits / np.outer(norms, norms), atol=1e-5)
        assert np.ptp(similarity) > 0.1
        for one, other in zip(by_batch[0][layer], by_batch[1][layer], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
