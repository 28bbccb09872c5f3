"""Q4_0 to Q5_1 with the importance of columns: the package decodes them, and errors are no larger than its own."""

import gguf
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from moe_jax.conversion.gguf.blocks.scaled_blocks import SCALED_BLOCKS, scaled_blocks
from moe_jax.conversion.gguf.gguf_file import quantized
from moe_jax.core.errors import InputError


def decoded(blocks, kind, shape):
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(shape).astype(np.float64)


def block_errors(rows, found, importance):
    """Of every block, as columns count: all of them a little."""
    weights = np.maximum(importance / importance.max(), 1e-6)
    return (np.square(rows - found) * weights).reshape(-1, 32).sum(-1)


def plain_errors(rows, kind, importance):
    return block_errors(rows, decoded(quantized(rows, kind), kind, rows.shape), importance)


@pytest.mark.parametrize("kind", SCALED_BLOCKS)
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    count=st.sampled_from([(1, 32), (3, 96), (2, 288)]),
    exponent=st.sampled_from([-20, -12, 0, 10]),
    shape=st.sampled_from(["normal", "positive", "constant", "zero", "one large"]),
    seed=st.integers(0, 99),
)
def test_errors_are_at_most_those_of_plain_rounding(kind, count, exponent, shape, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=count)
    if shape == "positive":
        rows = 3 + np.abs(rows)
    elif shape == "constant":
        rows = np.broadcast_to(rows[:, :1], count)
    elif shape == "zero":
        rows = np.zeros(count)
    elif shape == "one large":
        rows[:, 7] = -40
    rows = (rows * 2.0**exponent).astype(np.float32)
    importance = rng.random(count[1]).astype(np.float32) ** 4 + np.float32(1e-9)
    found = decoded(scaled_blocks(rows, kind, importance), kind, rows.shape)
    assert np.isfinite(found).all()
    ours, plain = block_errors(rows, found, importance), plain_errors(rows, kind, importance)
    # The package's Q4_1 and Q5_1 choose codes by a scale that is not yet a half.
    assert (ours <= plain * (1 + 1e-3) + 1e-5 * np.square(rows).max()).all()


@pytest.mark.parametrize(("kind", "share"), [("Q4_0", 0.8), ("Q4_1", 0.6), ("Q5_0", 0.8), ("Q5_1", 0.6)])
def test_columns_that_count_get_smaller_errors(kind, share):
    """The weighted error is much smaller, whichever block of a row the columns are in."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(64, 288)).astype(np.float32)
    importance = np.exp(2 * rng.normal(size=288)).astype(np.float32)
    found = decoded(quantized(rows, kind, importance), kind, rows.shape)
    ours, plain = block_errors(rows, found, importance).sum(), plain_errors(rows, kind, importance).sum()
    assert np.sqrt(ours / plain) < share, np.sqrt(ours / plain)
    turned = decoded(quantized(rows, kind, importance[::-1].copy()), kind, rows.shape)
    assert block_errors(rows, turned, importance).sum() > 1.5 * ours


@pytest.mark.parametrize("kind", SCALED_BLOCKS)
def test_parts_of_a_matrix_are_those_of_the_whole(kind):
    """More blocks than are coded at once, of rows that do not end where these do."""
    rng = np.random.default_rng(2)
    rows, importance = rng.normal(size=(500, 288)).astype(np.float32), rng.random(288).astype(np.float32)
    whole = scaled_blocks(rows, kind, importance)
    parts = [scaled_blocks(rows[start : start + 77], kind, importance) for start in range(0, 500, 77)]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("kind", SCALED_BLOCKS)
@pytest.mark.parametrize(
    ("value", "importance", "message"),
    [(np.inf, 1, "not finite"), (np.nan, 1, "not finite"), (1e30, 1, "halves"), (0, -1, "at least"), (0, np.nan, "at")],
)
def test_faults_are_one_line(kind, value, importance, message):
    rows, columns = np.zeros((2, 64), np.float32), np.ones(64, np.float32)
    rows[1, 3], columns[5] = value, importance
    with pytest.raises(InputError, match=message) as caught:
        scaled_blocks(rows, kind, columns)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", SCALED_BLOCKS)
def test_largest_numbers_that_a_half_can_stand_for(kind):
    rows = np.linspace(-6e4, 6e4, 64, dtype=np.float32).reshape(2, 32)
    found = decoded(scaled_blocks(rows, kind, np.ones(32, np.float32)), kind, rows.shape)
    assert np.abs(found - rows).max() < 6e4 / 8
