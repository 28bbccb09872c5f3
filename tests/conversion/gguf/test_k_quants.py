"""K-quants: bytes that the `gguf` package decodes, and errors no larger than those of plain rounding."""

import gguf
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np
import pytest

from moe_jax.conversion.gguf.blocks import k_quants
from moe_jax.conversion.gguf.blocks.k_layouts import K_LAYOUTS, Parts
from moe_jax.conversion.gguf.gguf_file import quantized
from moe_jax.core.errors import InputError

KINDS = list(K_LAYOUTS)
RUNS = {kind: (layout.run, layout.levels, layout.most, layout.has_minima) for kind, layout in K_LAYOUTS.items()}


def decoded(blocks, kind, shape):
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(shape).astype(np.float64)


def rounded_plainly(rows, kind):
    """The numbers that the nearest codes stand for, with scales from the smallest to the largest number of a run."""
    run, levels, most, has_minima = RUNS[kind]
    x = rows.astype(np.float64).reshape(-1, 256 // run, run)
    low = np.minimum(x.min(-1), 0) if has_minima else np.zeros(x.shape[:2])
    if has_minima:
        scale = (np.maximum(x.max(-1), 0) - low) / (levels - 1)
        d = (scale.max(-1) / most).astype(np.float16).astype(np.float64)[:, None]
    else:
        high = np.where(x.max(-1) > -x.min(-1), x.max(-1), x.min(-1))
        scale = high / -(levels // 2)
        high = np.where(scale.max(-1) > -scale.min(-1), scale.max(-1), scale.min(-1))
        d = (high / -(most + 1)).astype(np.float16).astype(np.float64)[:, None]
    m = (-low.min(-1) / most).astype(np.float16).astype(np.float64)[:, None]
    with np.errstate(all="ignore"):
        scale = np.nan_to_num(np.clip(np.rint(scale / d), 0 if has_minima else -most - 1, most)) * d
        low = np.nan_to_num(np.clip(np.rint(-low / m), 0, most)) * -m
        first = 0 if has_minima else -(levels // 2)
        codes = np.clip(np.rint((x - low[..., None]) / scale[..., None]), first, first + levels - 1)
    return (np.nan_to_num(codes) * scale[..., None] + low[..., None]).reshape(rows.shape)


def block_errors(rows, found, importance=None):
    weights = np.ones(rows.shape[-1]) if importance is None else importance / importance.max()
    return (np.square(rows - found) * np.maximum(weights, 1e-6)).reshape(-1, 256).sum(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_mean_what_the_package_decodes(kind):
    """Random integers in every place."""
    rng, (run, levels, most, has_minima) = np.random.default_rng(0), RUNS[kind]
    codes = rng.integers(0, levels, (7, 256), np.uint8)
    scales = rng.integers(0 if has_minima else -most - 1, most + 1, (7, 256 // run))
    minima = rng.integers(0, most + 1, (7, 256 // run)).astype(np.uint8) if has_minima else None
    d, m = (rng.normal(size=7).astype(np.float16) for _ in range(2))
    stored = (scales + (32 if kind == "Q3_K" else 0)).astype(np.int16).astype(np.uint8)
    blocks = K_LAYOUTS[kind].pack(Parts(codes, stored, minima, d, m if has_minima else None))
    expected = (codes.reshape(7, -1, run).astype(np.float64) - (0.0 if has_minima else levels // 2)) * (
        scales * d[:, None]
    )[..., None]
    if has_minima:
        expected -= (minima * m.astype(np.float64)[:, None])[..., None]
    np.testing.assert_allclose(decoded(blocks, kind, (7, 256)), expected.reshape(7, 256), rtol=2e-3, atol=2e-2)


NUMBERS = hypothesis.extra.numpy.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.sampled_from([256, 768])),
    elements=st.floats(-4, 4, width=32) | st.sampled_from([0.0, 1.0, -1.0, 3.75]),
    fill=st.floats(-1, 1, width=32),
)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    rows=NUMBERS,
    exponent=st.sampled_from([-40, -18, -6, 0, 3, 12]),
    shape=st.sampled_from(["normal", "mixed", "constant"]),
    seed=st.integers(0, 99),
    weighted=st.booleans(),
)
def test_errors_are_at_most_those_of_plain_rounding(kind, rows, exponent, shape, seed, weighted):
    rng = np.random.default_rng(seed)
    if shape == "mixed":  # runs of very different magnitudes, some of one sign
        rows = rows * np.repeat(np.exp(4 * rng.normal(size=(len(rows), rows.shape[1] // 16))), 16, axis=1)
        rows = np.clip(rows, -4, 4)
        rows[:, :64] = np.abs(rows[:, :64])
    elif shape == "constant":
        rows = np.broadcast_to(rows[:, :1], rows.shape)
    rows = (rows * 2.0**exponent).astype(np.float32)
    importance = rng.random(rows.shape[1]).astype(np.float32) ** 4 if weighted else None
    found = decoded(quantized(rows, kind, importance), kind, rows.shape)
    assert np.isfinite(found).all()
    ours, plain = (block_errors(rows, one, importance) for one in (found, rounded_plainly(rows, kind)))
    assert (ours <= plain * (1 + 1e-3) + 1e-7 * np.square(rows).max()).all()


@pytest.mark.parametrize(
    ("kind", "share"), [("Q2_K", 0.82), ("Q3_K", 0.94), ("Q4_K", 0.92), ("Q5_K", 0.92), ("Q6_K", 0.92)]
)
def test_of_normal_numbers_the_error_is_much_smaller(kind, share):
    rows = np.random.default_rng(1).normal(size=(13, 2048)).astype(np.float32)
    found = decoded(quantized(rows, kind), kind, rows.shape)
    ours, plain = (np.sqrt(block_errors(rows, one).mean()) for one in (found, rounded_plainly(rows, kind)))
    assert ours < share * plain, ours / plain


@pytest.mark.parametrize("kind", KINDS)
def test_importance_moves_the_error_away_from_columns_that_count(kind):
    rng = np.random.default_rng(2)
    rows, importance = rng.normal(size=(9, 512)).astype(np.float32), rng.random(512).astype(np.float32) ** 6
    with_it, without = (block_errors(rows, decoded(quantized(rows, kind, given), kind, rows.shape), importance).sum()
                        for given in (importance, None))  # fmt: skip
    assert with_it < 0.9 * without
    same = quantized(rows, kind)
    assert np.array_equal(quantized(rows, kind, np.full(512, 3.0, np.float32)), same)
    assert np.array_equal(quantized(rows, kind, np.zeros(512, np.float32)), same)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_are_zeros_and_rows_do_not_depend_on_each_other(kind, monkeypatch):
    assert not decoded(quantized(np.zeros((3, 256), np.float32), kind), kind, (3, 256)).any()
    assert quantized(np.zeros((0, 256), np.float32), kind).shape[0] == 0
    rows = np.random.default_rng(3).normal(size=(11, 512)).astype(np.float32)
    importance = np.random.default_rng(4).random(512).astype(np.float32)
    whole = quantized(rows, kind, importance)
    monkeypatch.setattr(k_quants, "_AT_ONCE", 3)
    assert np.array_equal(quantized(rows, kind, importance), whole)
    assert np.array_equal(quantized(rows[4:5], kind, importance), whole[8:10])


@pytest.mark.parametrize("kind", [*KINDS, "Q8_0", "Q5_1", "Q4_0"])
@pytest.mark.parametrize(("value", "message"), [(np.inf, "finite|halves"), (np.nan, "finite|halves"), (3e38, "halves")])
def test_numbers_that_blocks_cannot_hold(kind, value, message):
    rows = np.ones((2, 256), np.float32)
    rows[1, 100] = value
    with pytest.raises(InputError, match=message):
        quantized(rows, kind)


@pytest.mark.parametrize("value", [-1.0, np.nan])
def test_importance_must_be_a_number_from_0_on(value):
    with pytest.raises(InputError, match="importance"):
        quantized(np.ones((1, 256), np.float32), "Q4_K", np.full(256, value, np.float32))
