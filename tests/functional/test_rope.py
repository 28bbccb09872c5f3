"""Rotary embedding: what is rotated, by how much, and what that depends on. Scalings are compared with Transformers
in `tests/families`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core.errors import InputError
from moe_jax.functional.position_embeddings import RelativeBiasConfig, RopeConfig, apply_rope, rope_tables

jitted_tables = jax.jit(rope_tables, static_argnums=(0, 1, 2))

pytestmark = pytest.mark.usefixtures("strict_numerics")

LONGROPE = RopeConfig(
    scaling="longrope", factor=2.0, original_max_positions=8, short_factor=(1.0, 1.5), long_factor=(2.0, 3.0)
)
DYNAMIC = RopeConfig(scaling="dynamic", factor=2.0)


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25, 0.0])
def test_the_first_dimensions_are_rotated_and_the_others_pass_through(fraction):
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 16))
    r = int(16 * fraction)
    angles = np.arange(5)[:, None] / 100.0 ** (np.arange(0, r, 2) / max(1, r))
    expected = x.copy()
    for pair in range(r // 2):
        turned = (x[0, :, :, pair] + 1j * x[0, :, :, pair + r // 2]) * np.exp(1j * angles[:, pair])[:, None]
        expected[0, :, :, pair], expected[0, :, :, pair + r // 2] = turned.real, turned.imag
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    tables = jitted_tables(RopeConfig(theta=100.0, fraction=fraction), 16, 64, positions)
    got = jax.jit(apply_rope)(jnp.asarray(x, jnp.float32), *tables)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_array_equal(got[..., r:], np.float32(x[..., r:]))


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=lambda rope: rope.scaling)
def test_frequencies_depend_on_the_length_of_the_own_text_alone(rope):
    """Not on a longer row of the batch, on padding, or on a longer document in the same row."""

    def tables(positions, segments=None):
        segments = None if segments is None else jnp.asarray([segments], jnp.int32)
        return np.stack(jitted_tables(rope, 4, 8, jnp.asarray([positions], jnp.int32), segments))[:, 0]

    short, long = list(range(5)), list(range(13))
    alone, stretched = tables(short), tables(long)
    assert not np.allclose(alone, stretched[:, :5])
    rows = jnp.asarray([short + [0] * 8, long], jnp.int32)
    np.testing.assert_array_equal(np.stack(jitted_tables(rope, 4, 8, rows))[:, 0, :5], alone)
    np.testing.assert_array_equal(tables(long, [1] * 5 + [0] * 8)[:, :5], alone)
    packed = tables(short + long, [1] * 5 + [2] * 13)
    np.testing.assert_array_equal(packed[:, :5], alone)
    np.testing.assert_array_equal(packed[:, 5:], stretched)


@pytest.mark.parametrize(
    ("factor", "own", "expected"),
    [(2.0, None, (1 + np.log(2) / np.log(8)) ** 0.5), (1.0, None, 1.0), (0.5, None, 1.0), (2.0, 1.75, 1.75)],
)
def test_longrope_scales_what_it_rotates(factor, own, expected):
    rope = dataclasses.replace(LONGROPE, factor=factor, attention_factor=own)
    cos, sin = jitted_tables(rope, 4, 8, jnp.arange(12, dtype=jnp.int32)[None])
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-6)


def test_dynamic_frequencies_are_the_plain_ones_within_the_trained_context():
    positions = jnp.arange(8, dtype=jnp.int32)[None]
    plain = jitted_tables(RopeConfig(), 4, 8, positions)
    for length in (1, 5, 8):
        tables = jitted_tables(DYNAMIC, 4, 8, positions[:, :length])
        np.testing.assert_allclose(tables, [table[:, :length] for table in plain], atol=1e-6)


def test_a_fraction_is_a_share():
    with pytest.raises(InputError, match=r"rope fraction=1.5 must lie in \[0, 1\]"):
        RopeConfig(fraction=1.5)


def test_gradients_pass_through_every_dimension():
    tables = jitted_tables(RopeConfig(fraction=0.5), 8, 16, jnp.arange(3, dtype=jnp.int32)[None])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(apply_rope(x, *tables)))))(jnp.ones((1, 3, 1, 8)))
    np.testing.assert_allclose(gradient, 2.0, rtol=1e-5)  # a rotation keeps the norm


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("original", [4096, 32768])
def test_yarn_at_the_size_of_real_heads_is_that_of_transformers(original, truncate):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(factor=40.0, original_max_position_embeddings=original, beta_fast=32.0, beta_slow=1.0)
    parameters = dict(rope_type="yarn", rope_theta=10000.0, truncate=truncate, **scaling)
    sizes = dict(hidden_size=256, num_attention_heads=2, max_position_embeddings=40 * original)
    theirs = transformers.LlamaConfig(**sizes, rope_parameters=parameters)
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = RopeConfig(scaling="yarn", factor=40.0, original_max_positions=original, truncate=truncate)
    cosines, sines = jitted_tables(ours, 128, 40 * original, jnp.ones((1, 1), jnp.int32))
    expected = np.concatenate([frequencies.numpy()] * 2)
    np.testing.assert_allclose(np.ravel(sines), np.sin(expected) * scale, rtol=1e-5)
    np.testing.assert_allclose(np.ravel(cosines), np.cos(expected) * scale, rtol=1e-5)


@pytest.mark.parametrize(
    ("mask", "buckets", "farthest", "problem"),
    [
        ("causal", 2, 2, None),
        ("causal", 1, 2, "too few"),
        ("bidirectional", 4, 2, None),
        ("bidirectional", 3, 2, "too few"),
        ("causal", 8, 5, None),
        ("causal", 8, 4, "must be above 4"),
        ("bidirectional", 16, 5, None),
        ("bidirectional", 16, 4, "must be above 4"),
    ],
)
def test_buckets_of_distances_must_fit_the_mask(mask, buckets, farthest, problem):
    config = RelativeBiasConfig(buckets=buckets, max_distance=farthest)
    if problem is None:
        config.check_fits(mask)
        assert config.bucket_of_distance(mask).max() == buckets - 1
    else:
        with pytest.raises(InputError, match=problem):
            config.check_fits(mask)
