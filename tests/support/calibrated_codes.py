"""Models that are put in codes by what a text gives them: how that is asked for, and what must hold of any of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.compression.calibration.coded_pass import CodedPass
from tests.support.numerics import logits_of


def by_text(text: Path, samples: int = 6) -> tuple[str, ...]:
    """Options of a command that calibrates on windows of 32 tokens."""
    return "--calibrate", str(text), "--samples", str(samples), "--seq-len", "32"


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of the model at a path."""
    return np.asarray(logits_of(moe_jax.load(model).decoder, jnp.asarray(tokens)))


def check_nearer(whole: np.ndarray, ours: np.ndarray, rounded: np.ndarray) -> None:
    """Our logits are clearly nearer to those of the whole model than those of a model that was rounded."""
    assert np.square(ours - whole).mean() < 0.8 * np.square(rounded - whole).mean()


def mean_nll(given: np.ndarray, windows: np.ndarray) -> float:
    """The negative log-likelihood of windows, nats per token, in float64."""
    shifted = given[:, :-1].astype(np.float64)
    told = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-np.take_along_axis(told, windows[:, 1:, None], -1).mean())


def killed_and_continued(
    run: Callable[[Path], int], out: Path, layer: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Stops a command as its pass calls `when` for a layer, and gives it again; returns the layers that it then begins.

    Meanwhile there is nothing at `out`.
    """
    whole, begin, begun = getattr(CodedPass, when), CodedPass.begin, []

    def stop(self, given):
        if self.next == layer:
            raise OSError("as if the disk was full")
        return whole(self, given)

    with monkeypatch.context() as patched:
        patched.setattr(CodedPass, when, stop)
        assert run(out) != 0
    assert not out.exists()
    with monkeypatch.context() as patched:
        patched.setattr(CodedPass, "begin", lambda self, i: (begun.append(i), begin(self, i))[1])
        assert run(out) == 0
    return begun
