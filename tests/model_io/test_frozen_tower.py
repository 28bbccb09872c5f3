"""Features of a tower apart from its model: those of the step, whatever is beside a picture, and made once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.images.feature_cache import digest_of
from moe_jax.model_io.frozen_tower import FrozenTower
from moe_jax.model_io.loading import load_model
from tests.support.dense_models import dense_config, random_leaves
from tests.support.moe_models import MemorySource
from tests.support.seeing_models import FEATURES, pictures, seeing, tower_config

CONFIG = seeing(dense_config(num_layers=1))
LEAVES = random_leaves(CONFIG)
PIXELS = pictures(1, 11)[0]
DIGESTS = np.stack([digest_of(bytes([index])) for index in range(11)])
PICTURES = [(digest.tobytes(), pixels) for digest, pixels in zip(DIGESTS, PIXELS, strict=True)]
BYTES = 10**7


def tower(**options) -> FrozenTower:
    return FrozenTower(MemorySource(CONFIG, LEAVES), **{"group": 4, **options})


@pytest.fixture(scope="module")
def features():
    return tower().features_of(PICTURES)


@pytest.mark.parametrize(("compute_dtype", "allowed"), [("float32", 1e-6), ("bfloat16", 2**-7)])
def test_features_are_those_of_the_step(compute_dtype, allowed):
    model = load_model(MemorySource(CONFIG, LEAVES), compute_dtype=compute_dtype)
    expected = nnx.jit(lambda model, pixels: model.vision.features(pixels))(model, PIXELS[None])[0]
    found = tower(compute_dtype=compute_dtype).features_of(PICTURES)
    assert all(one.dtype == jnp.dtype(compute_dtype) and one.shape == (FEATURES, 16) for one in found)
    # Not to the bit: products of another number of pictures may add up in another order.
    found, expected = np.stack(found).astype(np.float32), np.asarray(expected, np.float32)
    assert np.abs(found - expected).max() <= allowed * np.abs(expected).max()


def test_a_picture_has_the_same_features_whatever_is_beside_it(features):
    with jax.set_mesh(make_mesh({"fsdp": -1})):  # as in a run
        alone = tower().features_of(PICTURES[5:6])[0]
    assert alone.tobytes() == features[5].tobytes()
    backward = tower().features_of(PICTURES[::-1])[::-1]
    assert [one.tobytes() for one in backward] == [one.tobytes() for one in features]


def test_a_second_epoch_asks_no_tower(tmp_path, features):
    first, second = tower(), tower()
    first.keep_in(tmp_path, max_bytes=BYTES)
    first.features_of(PICTURES[:3] + PICTURES[1:4])
    assert (first.computed, first.found) == (4, 0)
    first.features_of(PICTURES)
    assert (first.computed, first.found) == (11, 4)
    second.keep_in(tmp_path, max_bytes=BYTES)
    second._program = None  # which would be called
    assert [one.tobytes() for one in second.features_of(PICTURES)] == [one.tobytes() for one in features]
    assert (second.computed, second.found) == (0, 11)


def test_a_damaged_file_is_made_anew(tmp_path, features):
    first = tower()
    first.keep_in(tmp_path, max_bytes=BYTES)
    first.features_of(PICTURES[:2])
    for file, content in zip(sorted(tmp_path.iterdir()), (b"", b"x" * (32 + 4 * FEATURES * 16)), strict=True):
        file.write_bytes(content)
    assert [one.tobytes() for one in first.features_of(PICTURES[:2])] == [one.tobytes() for one in features[:2]]
    assert first.computed == 4


def changed(path: str) -> dict[str, np.ndarray]:
    """The leaves with one entry of one of them changed."""
    leaf = LEAVES[path].copy()
    leaf.flat[-1] += 1
    return LEAVES | {path: leaf}


def test_features_of_another_tower_are_not_taken(tmp_path):
    said, first = [], tower()
    first.keep_in(tmp_path, max_bytes=BYTES, note=said.append)
    first.features_of(PICTURES[:1])
    source = MemorySource(CONFIG, changed("vision/tower/layers/1/mlp/down/kernel"))
    other = FrozenTower(source, group=4)
    other.keep_in(tmp_path, max_bytes=BYTES, note=said.append)
    assert other.features_of(PICTURES[:1])[0].tobytes() != first.features_of(PICTURES[:1])[0].tobytes()
    assert (first.computed, other.computed) == (1, 1) and len(list(tmp_path.iterdir())) == 2
    assert len(said) == 1 and "another tower" in said[0] and str(tmp_path) in said[0]
    # Its own are there now.
    FrozenTower(source).keep_in(tmp_path, max_bytes=BYTES, note=said.append)
    assert len(said) == 1


def test_another_processing_has_its_own(tmp_path):
    padded = dataclasses.replace(CONFIG.vision.processing, pad=True)
    config = dataclasses.replace(CONFIG, vision=dataclasses.replace(CONFIG.vision, processing=padded))
    towers = tower(), FrozenTower(MemorySource(config, LEAVES), group=4)
    assert towers[0].fingerprint == towers[1].fingerprint
    for one in towers:
        one.keep_in(tmp_path, max_bytes=BYTES)
        one.features_of(PICTURES[:1])
        assert one.computed == 1


def test_the_fingerprint_is_of_what_features_depend_on():
    def fingerprint(leaves=LEAVES, config=CONFIG, **options):
        return FrozenTower(MemorySource(config, leaves), **options).fingerprint

    def looking(**options):
        return dataclasses.replace(CONFIG, vision=dataclasses.replace(CONFIG.vision, **options))

    own = fingerprint()
    for path in ("patches/projection/kernel", "patches/positions", "patches/class_token", "layers/0/mlp/up/bias"):
        assert fingerprint(changed(f"vision/tower/{path}")) != own, path
    # The last layer is not run, and the rest is no tower's.
    others = "vision/tower/layers/2/mlp/up/bias", "vision/tower/patches/pooled_norm/scale", "vision/projector/0/kernel"
    for path in (*others, "embed/embedding"):
        assert path not in LEAVES or fingerprint(changed(path)) == own, path
    assert {path for path in others if path in LEAVES} >= {others[0], others[2]}
    assert fingerprint(changed(others[0]), looking(features=(-1,))) != fingerprint(config=looking(features=(-1,)))
    given = [{"config": looking(features=(-3,))}, {"config": looking(drop_first=0)}, {"compute_dtype": "bfloat16"}]
    assert len({own, *(fingerprint(**one) for one in [*given, {"param_dtype": "bfloat16"}])}) == 5
    assert fingerprint(config=looking(features=(2,))) == own  # the same hidden state


def test_another_model_has_the_same_tower_whatever_else_it_has():
    one, kernel = tower(), "vision/tower/layers/0/mlp/up/kernel"
    stored = {path: leaf.astype(jnp.bfloat16) for path, leaf in LEAVES.items()}
    rough = FrozenTower(MemorySource(CONFIG, stored))
    assert one.is_of(MemorySource(CONFIG, changed("vision/projector/0/kernel")))
    assert rough.is_of(MemorySource(CONFIG, LEAVES)) and not one.is_of(MemorySource(CONFIG, stored))
    assert not one.is_of(MemorySource(CONFIG, changed(kernel)))
    smaller = seeing(dense_config(num_layers=1), tower=tower_config(layers=2))
    assert not one.is_of(MemorySource(smaller, random_leaves(smaller)))


def test_a_batch_gets_features_in_place_of_pixels(features):
    batch = {"tokens": np.zeros((2, 3), np.int32), "pixels": PIXELS[:6].reshape(2, 3, *PIXELS.shape[1:])}
    digests = DIGESTS[:6].reshape(2, 3, 32).copy()
    digests[1, 2] = 0  # no picture
    one = tower()
    filled = one.fill(batch | {"digests": digests})
    assert set(filled) == {"tokens", "features"} and filled["features"].shape == (2, 3, FEATURES, 16)
    np.testing.assert_array_equal(filled["features"].reshape(6, FEATURES, 16)[:5], features[:5])
    assert not filled["features"][1, 2].any() and one.computed == 5
    with pytest.raises(InputError, match="digests of pictures"):
        one.fill(batch | {"digests": digests[:1]})
    known = {"known": np.arange(6).reshape(2, 3) < 2, "features": np.ones_like(filled["features"])}
    partly = one.fill(batch | {"digests": digests, **known})["features"].reshape(6, FEATURES, 16)
    assert (partly[:2] == 1).all() and one.computed == 8
    np.testing.assert_array_equal(partly[2:5], features[2:5])


def test_a_model_that_takes_no_pictures_has_no_tower():
    blind = dense_config(num_layers=1)
    with pytest.raises(InputError, match="takes no pictures"):
        FrozenTower(MemorySource(blind, random_leaves(blind)))
