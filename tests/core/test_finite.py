"""The rule for numbers that are not finite."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.core.errors import InputError
from moe_jax.core.finite import DoesNotFit, cast, check_finite, check_fits, largest_magnitude

DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
DTYPES |= {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 2**32 - 1), size=st.integers(1, 40))
def test_the_largest_magnitude_of_any_bits(name: str, seed: int, size: int):
    dtype = DTYPES[name]
    array = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)
    with np.errstate(invalid="ignore"):
        expected = np.max(np.abs(array)).astype(np.float64)  # NaN if there is one
    assert np.array_equal(largest_magnitude(array), expected, equal_nan=True)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 77, 150_000, -1])
def test_one_number_among_many(name: str, value: float, at: int):
    """Also beyond the first block, and in the last, shorter one."""
    array = np.random.default_rng(0).standard_normal(300_001).astype(DTYPES[name])
    array[at] = value
    assert not math.isfinite(largest_magnitude(array)) and math.isnan(largest_magnitude(array)) == math.isnan(value)


def test_views_without_copying():
    array = np.arange(-12, 12, dtype=np.float32).reshape(4, 6)
    assert [largest_magnitude(view) for view in (array[:3, ::2], array.T, array[2:])] == [12, 12, 11]
    repeated = np.broadcast_to(array, (1 << 40, 4, 6))  # would not fit into any memory
    assert largest_magnitude(repeated) == 12
    assert largest_magnitude(np.float32(-3)[...]) == 3
    assert largest_magnitude(np.zeros((0, 3), np.float32)) == 0 and largest_magnitude(np.arange(5)) == 0


def test_the_error_says_which_number_and_where():
    array = np.zeros((3, 4), ml_dtypes.bfloat16)
    array[1, 2], array[2, 0] = -np.inf, np.nan
    with pytest.raises(InputError) as error:
        check_finite("layers/0/mlp/up/kernel", array, "mend it")
    expected = "layers/0/mlp/up/kernel: 2 of 12 numbers not finite, the first -inf at [1, 2]; mend it"
    assert str(error.value) == expected
    check_finite("codes", np.arange(3), "mend it")


@pytest.mark.parametrize(
    ("value", "stored", "target", "choose"),
    [
        (7e4, "float32", "float16", "bfloat16 or float32"),
        (-7e4, "bfloat16", "float16", "bfloat16 or float32"),
        (65520.0, "float32", "float16", "bfloat16 or float32"),  # halfway to 65536: rounds to infinity
        (3.4e38, "float32", "bfloat16", "float32"),
        (1e300, "float64", "float32", "to keep float64"),
    ],
)
def test_numbers_that_do_not_fit(value: float, stored: str, target: str, choose: str):
    array = np.array([1.0, value, 2.0], DTYPES[stored])
    with pytest.raises(DoesNotFit, match=rf"^a/leaf: .* {target}, .*; choose {choose}$"):
        cast("a/leaf", array, DTYPES[target])


@pytest.mark.filterwarnings("error")
def test_numbers_that_fit():
    near = np.array([65519.0, -65504.0], np.float32)  # rounds to the largest number
    assert cast("near", near, np.float16).tolist() == [65504.0, -65504.0]
    assert cast("same", near, np.float32) is near
    kept = cast("kept", np.array([np.inf, -np.inf, np.nan], np.float32), np.float16)
    assert np.isposinf(kept[0]) and np.isneginf(kept[1]) and np.isnan(kept[2])
    with pytest.raises(DoesNotFit, match="100000 does not fit"):  # not hidden by what is infinite already
        check_fits("both", np.array([np.nan, np.inf, 1e5], np.float32), np.float16)
