"""Every family with attention, FFNs, experts, embedding and head in codes: the model is its decoded self."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.compression.linear_maps import linear_maps
from moe_jax.model_io.without_codes import without_codes
from moe_jax.nn import init_cache
from tests.families.cases import FILES
from tests.families.reference import random_model, saved
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.tiers import long

pytestmark = long
LENGTH = 24
TOKENS = np.random.default_rng(0).integers(0, 256, (2, LENGTH))
APPLY = nnx.jit(lambda model, tokens, **options: model(tokens, **options))


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__.rsplit(".", 1)[1])
def test_a_model_in_codes_is_its_decoded_self(file, tmp_path):
    name = next(iter(file.CASES))
    folder = tmp_path / "model"
    saved(random_model(file, name, vocab_size=264), folder)
    byte_tokenizer(folder / "tokenizer.json")
    text = tmp_path / "text.txt"
    text.write_text("All the world is a stage, and all the men and women merely players. " * 4)
    options = {"method": "quantize", "bits": 8, "group_size": 16, "of": "model"}
    coded = moe_jax.compress(folder, None, calibrate=text, samples=4, seq_len=32, **options)
    decoded = without_codes(coded.source)
    assert linear_maps(decoded.config) and not linear_maps(coded.config)
    expected = np.asarray(APPLY(moe_jax.Model.of_source(decoded).decoder, TOKENS).logits)
    assert close(APPLY(coded.decoder, TOKENS).logits, expected)
    before = np.asarray(APPLY(moe_jax.load(folder).decoder, TOKENS).logits)
    # Of most tokens: some change their experts where these are nearly as good, and then much.
    assert np.median(np.square(expected - before).mean(axis=-1)) < 0.05 * before.var()
    caches = init_cache(coded.config, 2, LENGTH, jnp.dtype("float32"))
    for at in range(LENGTH):
        positions = jnp.full((2, 1), at, jnp.int32)
        out = APPLY(coded.decoder, TOKENS[:, at : at + 1], positions=positions, caches=caches)
        assert close(out.logits[:, 0], expected[:, at]), f"at {at}"
        caches = out.caches
