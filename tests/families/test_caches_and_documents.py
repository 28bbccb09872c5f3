"""Every family: a text that is read in pieces, or packed with others, has the logits that it has alone and at once."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.model_io.loading import load_model
from moe_jax.nn import init_cache
from tests.families.cases import FILES, SMALL
from tests.families.reference import random_model, saved
from tests.support.tiers import long

pytestmark = long
LENGTH = 40  # many windows of the small models
TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, LENGTH))
APPLY = nnx.jit(lambda model, tokens, **options: model(tokens, **options))


@pytest.fixture(scope="module", params=FILES, ids=lambda file: file.__name__.rsplit(".", 1)[1])
def read(request, tmp_path_factory):
    """The first small model of a family, as a function of tokens, and its logits without a cache."""
    name = next(iter(request.param.CASES))
    model = load_model(saved(random_model(request.param, name), tmp_path_factory.mktemp(name)))

    def apply(tokens, **options):
        return APPLY(model, jnp.asarray(tokens, jnp.int32), **options)

    return model.config, apply, np.asarray(apply(TOKENS).logits)


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "pieces", [(LENGTH,), (23, 1, 16), (1,) * LENGTH], ids=["at once", "in pieces", "token by token"]
)
def test_a_cache_gives_the_same_logits(read, pieces):
    config, apply, expected = read
    caches, start = init_cache(config, 2, LENGTH + 4, jnp.dtype("float32")), 0
    for length in pieces:
        positions = jnp.broadcast_to(jnp.arange(start, start + length, dtype=jnp.int32)[None], (2, length))
        out = apply(TOKENS[:, start : start + length], positions=positions, caches=caches)
        assert close(out.logits, expected[:, start : start + length]), f"from {start} on"
        caches, start = out.caches, start + length


def test_packed_documents_are_those_alone(read):
    _, apply, expected = read
    segments = jnp.asarray([[1] * 13 + [2] * 27] * 2, jnp.int32)
    positions = jnp.asarray([[*range(13), *range(27)]] * 2, jnp.int32)
    got = apply(TOKENS, positions=positions, segment_ids=segments).logits
    alone = apply(TOKENS[:, 13:]).logits
    assert close(got[:, :13], expected[:, :13]) and close(got[:, 13:], alone)
    assert not close(expected[:, 13:], alone)  # otherwise equality would say little
