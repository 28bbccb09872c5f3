"""Kernels run in interpret mode, with blocks so small that few rows fill several."""

from functools import partial

import pytest

from moe_jax.functional import gated, synthesis
from moe_jax.kernels.tpu import grouped_outer, low_rank_gradient, product_blocks
from moe_jax.kernels.tpu.chip import MIB, Core

SMALL = {"core": Core(vmem=64 * MIB, cores=2, rows=8), "interpret": True}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 rows; with the options `SMALL`, in strips of 8."""
    monkeypatch.setattr(product_blocks, "ROW_BLOCKS", (16,))
    monkeypatch.setattr(grouped_outer, "ROW_BLOCK", 16)
    monkeypatch.setattr(low_rank_gradient, "ROW_BLOCKS", (16,))
    monkeypatch.setattr(low_rank_gradient, "STRIP", 8)


@pytest.fixture
def fused(small_blocks, monkeypatch):
    """Kernels that are made tile by tile are made in Pallas kernels, in interpret mode."""

    def choose(tiles, dtype, out, *, loops, tpu, gpu):
        tile = tiles.fused()
        assert not isinstance(tile, str), tile
        return partial(tpu, tile=tile, shape=tiles.shape, **SMALL)

    monkeypatch.setattr(synthesis, "_choose", choose)
    monkeypatch.setattr(gated, "_choose", lambda apart, dtype, out, *, tpu: partial(tpu, **SMALL))
