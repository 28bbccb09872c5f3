"""The eye is a part of the model everywhere: at step 0, in what verbs keep of it, in sizes and words."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.checks.step0 import Probe, probe_pictures, probe_tokens
from moe_jax.checks.streamed_model import StreamedModel
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import load_model, model_leaves
from moe_jax.nn.projector import tokens_per_picture
from tests.support.dense_models import dense_config, random_leaves
from tests.support.moe_models import MemorySource
from tests.support.numerics import logits_of
from tests.support.seeing_models import picture_batch, pictures, seeing
from tests.support.tiers import one_in

CONFIG = seeing(dense_config(num_layers=2))


@pytest.fixture(scope="module")
def dense() -> moe_jax.Model:
    return moe_jax.Model(load_model(MemorySource(CONFIG, random_leaves(CONFIG))))


def pictured(model: moe_jax.Model) -> np.ndarray:
    """Logits of rows with pictures."""
    batch = picture_batch(CONFIG, 24, (2, 12), (5,))
    return np.asarray(logits_of(model.decoder, *[batch["tokens"]], pixels=batch["pixels"], slots=batch["slots"]))


def of_eye(model: moe_jax.Model) -> dict[str, bytes]:
    leaves = model_leaves(model.decoder)
    return {path: np.asarray(leaf).tobytes() for path, leaf in leaves if path.startswith("vision/")}


@pytest.mark.parametrize("features", [(-2,), (0, 2, -1)], ids=str)
def test_a_streamed_model_sees_what_the_decoder_sees(features):
    config = seeing(dense_config(num_layers=1), features=features)
    config = dataclasses.replace(
        config,
        vision=dataclasses.replace(config.vision, tower=dataclasses.replace(config.vision.tower, final_norm=True)),
    )
    source = MemorySource(config, random_leaves(config))
    tokens, given = probe_tokens(config, 0), probe_pictures(config, 0)
    streamed = StreamedModel(config, source.specs(), tokens, pictures=given)
    expected = logits_of(load_model(source), jnp.asarray(tokens), **given._asdict())
    np.testing.assert_allclose(streamed.logits(source.read), expected, rtol=1e-5, atol=1e-5)
    assert sorted({*given.slots.flat}) == list(range(tokens_per_picture(config.vision, config.d_model) + 1))
    # The last layer is read only where something is taken of it.
    read = []
    streamed.logits(lambda path: read.append(path) or source.read(path))
    assert any("tower/layers/2" in path for path in read) == (-1 in features)


BANKS = {"vanilla": {}, "low-rank": {"delta": "low-rank:2"}, "sparse": {"delta": "sparse:0.9"}}


@one_in(3)
@pytest.mark.parametrize("bank", BANKS)
def test_an_upcycled_model_begins_as_the_dense_one_with_pictures_too(dense, bank):
    moe = moe_jax.upcycle(dense, experts=4, every=1, **BANKS[bank])
    assert moe.config.vision == CONFIG.vision and of_eye(moe) == of_eye(dense)
    measured = moe.lineage[-1]["measured"]
    assert measured["step0_max_abs_difference"] <= measured["step0_allowed"]
    # Products of experts add up in another order than that of one FFN; what pictures become is the same to the bit.
    pixels = pictures(2, 1)
    np.testing.assert_array_equal(moe.decoder.see(pixels), dense.decoder.see(pixels))
    np.testing.assert_allclose(pictured(moe), pictured(dense), atol=measured["step0_allowed"])


def test_the_check_sees_pictures(dense, monkeypatch):
    changed = lambda read: lambda path: read(path) + ("vision/" in path) * np.float32(0.1)  # noqa: E731
    compare = Probe.compare
    monkeypatch.setattr(Probe, "compare", lambda self, read, *rest, **more: compare(self, changed(read), *rest, **more))
    with pytest.raises(InputError, match="logits differ"):
        moe_jax.upcycle(dense, experts=4, every=1)


def test_med_begins_elsewhere(dense):
    with pytest.raises(InputError, match="universal 'med' has weights that do not sum to 1"):
        moe_jax.upcycle(dense, experts=4, every=1, universal="med")
    moe = moe_jax.upcycle(dense, experts=4, every=1, universal="med", step0_check=False)
    before, after = pictured(dense), pictured(moe)
    assert of_eye(moe) == of_eye(dense) and np.abs(after - before).max() > 0.1


@one_in(4)
@pytest.mark.parametrize("verb", ["compress", "adapt", "merge", "pesc"])
def test_verbs_of_the_language_side_leave_the_eye_to_the_bit(dense, verb):
    if verb == "compress":
        moe = moe_jax.upcycle(dense, experts=4, every=1, step0_check=False)
        made = moe_jax.compress(moe, method="quantize", bits=4)
    elif verb == "pesc":
        made = moe_jax.upcycle(dense, method="pesc", experts=4, every=1, rest="qlora:2", adapter=4)
    else:
        made = moe_jax.adapt(dense, method="lora", adapter="lora:2", targets="q,v,up")
        made = moe_jax.merge(made) if verb == "merge" else made
    assert made.config.vision == CONFIG.vision and of_eye(made) == of_eye(dense)
    assert np.isfinite(pictured(made)).all()
