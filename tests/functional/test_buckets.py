"""Lengths in buckets."""

from hypothesis import given
from hypothesis import strategies as st

from moe_jax.kernels.hardware import bucket


def test_buckets_are_powers_of_two_and_a_step_between():
    assert sorted({bucket(length) for length in range(1, 200)}) == [16, 24, 32, 48, 64, 96, 128, 192, 256]


@given(st.integers(1, 1 << 40))
def test_a_bucket_is_the_least_that_holds_the_length(length):
    size = bucket(length)
    assert size >= length and bucket(size) == size
    assert size == 16 or bucket(size - 1) == size
    assert size <= max(16, 1.5 * length)
