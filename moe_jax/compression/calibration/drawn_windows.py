"""Chooses the parts of a text that a model is calibrated on."""

import numpy as np
from jaxtyping import Int

from moe_jax.core.errors import InputError

DEFAULT_SAMPLES = 128
"""Default number of windows, if the text has as many: as many as GPTQ's authors took."""


def sample_windows(
    ids: Int[np.ndarray, " n"], *, seq_len: int, samples: int | None = None, seed: int = 0
) -> Int[np.ndarray, "N L"]:
    """Draws windows, none of them twice; in the order of the text.

    Args:
      ids: of the tokens of the text.
      seq_len: L, tokens of a window; for a shorter text all of it.
      samples: N; None: `DEFAULT_SAMPLES`, or as many as there are.
      seed: of the draw.

    Raises:
      InputError: if the text has fewer windows than requested.
    """
    length = min(seq_len, len(ids))
    count = len(ids) // length
    if samples is not None and not 1 <= samples <= count:
        raise InputError(
            f"samples={samples}: the calibration text has {len(ids)} tokens, which are {count} windows of {length}; "
            "ask for at most so many, or give a longer text"
        )
    wanted = min(DEFAULT_SAMPLES, count) if samples is None else samples
    chosen = np.sort(np.random.Generator(np.random.Philox(seed)).permutation(count)[:wanted])
    return ids[: count * length].reshape(count, length)[chosen].astype(np.int32)
