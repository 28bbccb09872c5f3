"""Numbers that are not finite, and those that a dtype cannot hold: one rule for all that is cast or written.

A cast that would turn a finite number into an infinite one is an error. So is a leaf with NaN or infinity where leaves
are written, unless the user allows it.
"""

import math

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from moe_jax.core.errors import InputError

REMEDY = "mend the source; convert, upcycle, adapt, merge and export can also go on, with --allow-nonfinite"
_SIGNED = {2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}
# Numbers looked at together: few enough to stay in the cache while they are gone through twice.
_BLOCK = 1 << 17


class DoesNotFit(InputError):
    """A finite number is too large for the dtype that it is to be cast to."""


def is_floating(dtype: np.dtype) -> bool:
    """Whether a dtype is of floating point, bfloat16 included."""
    return jnp.issubdtype(dtype, jnp.floating)


def largest_magnitude(array: np.ndarray) -> float:
    """Returns the largest absolute value; infinite if one is infinite, NaN if one is NaN. Copies nothing.

    It is 0 for an array that is empty or not of floating point.

    The bits of a float without its sign grow with its magnitude, those of NaN above those of infinity. As signed
    integers, positive floats come after negative ones; as unsigned integers it is the other way round. So the largest
    integer of either kind is all that is needed, which is found several times faster than `np.isfinite(array).all()`.
    """
    if array.size == 0 or not is_floating(array.dtype):
        return 0.0
    signed = _SIGNED[array.itemsize]
    bits, no_sign = _without_repeats(array).view(signed), np.iinfo(signed).max
    blocks = [bits]
    if bits.flags.c_contiguous:
        flat = bits.reshape(-1)
        blocks = [flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK)]
    largest = max(
        max(int(block.max()) & no_sign, int(block.view(f"u{signed.itemsize}").max()) & no_sign) for block in blocks
    )
    return float(np.array(largest, signed).view(array.dtype))


def check_finite(leaf: str, array: np.ndarray, remedy: str) -> None:
    """Raises `InputError` if a number is not finite; it names the leaf, and as `remedy` what the user can do."""
    if math.isfinite(largest_magnitude(array)):
        return
    array = _without_repeats(array)
    wrong = ~np.isfinite(array)
    first = np.unravel_index(int(np.argmax(wrong)), array.shape)
    at = ", ".join(map(str, first))
    count = f"{np.count_nonzero(wrong):,} of {array.size:,} numbers not finite"
    raise InputError(f"{leaf}: {count}, the first {array[first]} at [{at}]; {remedy}")


def check_fits(leaf: str, array: np.ndarray, dtype: npt.DTypeLike) -> None:
    """Raises `DoesNotFit` if a finite number of a leaf becomes infinite in a floating-point dtype."""
    dtype = np.dtype(dtype)
    most = float(jnp.finfo(dtype).max)
    if not is_floating(array.dtype) or float(jnp.finfo(array.dtype).max) <= most:
        return
    largest = largest_magnitude(array)
    if not math.isfinite(largest):  # of the others, then
        largest = largest_magnitude(array[np.isfinite(array)])
    # Rounded, because numbers a little above the largest one still become it.
    if np.isinf(_rounded(largest, array.dtype, dtype)):
        names = ("bfloat16", "float32")
        fitting = [name for name in names if np.isfinite(_rounded(largest, array.dtype, jnp.dtype(name)))]
        wider = " or ".join(fitting) or f"to keep {array.dtype}"
        raise DoesNotFit(
            f"{leaf}: {largest:.6g} does not fit in {dtype}, whose largest number is {most:.6g}; choose {wider}"
        )


def cast(leaf: str, array: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """Returns a leaf in another floating-point dtype; the array itself if it has this dtype.

    NaN and infinity stay what they are. Raises `DoesNotFit` if a finite number becomes infinite.
    """
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    check_fits(leaf, array, dtype)
    with np.errstate(all="ignore"):  # NumPy warns of NaN
        return array.astype(dtype)


def _without_repeats(array: np.ndarray) -> np.ndarray:
    """The entries of a view that repeats them, once: experts that are copies have stride 0 along their axis."""
    return array[tuple(slice(1) if stride == 0 else slice(None) for stride in array.strides)]


def _rounded(value: float, source: np.dtype, target: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # said in our own words
        return np.array(value, source).astype(target)
