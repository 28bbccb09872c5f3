"""Options of `ders-quantize`. What its codes stand for is in `coding/test_quantizer.py`."""

import pytest

from moe_jax.compression.methods.deltas import Quantize
from moe_jax.core.errors import InputError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits=5 must be one of 8, 4, 3, 2, 1"),
        ({"bits": 4, "group_size": 12}, "group_size=12 must be a multiple of 8"),
        # Kernels are filled up to whole groups, which would take all memory.
        ({"bits": 4, "group_size": 2**31 - 8}, "at most 65,536"),
        ({"bits": 4, "levels": "fitted", "scale": "absmax"}, "leave scale=absmax out"),
        ({"bits": 1, "levels": "fitted"}, "bits=1 have no table"),
        ({"bits": 4, "scale": "absmex"}, "unknown scale 'absmex' (did you mean 'absmax'?)"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError) as caught:
        Quantize(**options)
    assert message in str(caught.value)
