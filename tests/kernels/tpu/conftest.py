"""Kernels run in interpret mode, with blocks so small that few rows fill several."""

from functools import partial
from typing import NamedTuple

import pytest

from moe_jax.functional import gated, synthesis
from moe_jax.kernels.hardware import MIB, Core, round_up
from moe_jax.kernels.tpu import kernel_gradients, product_blocks
from moe_jax.kernels.tpu.product_blocks import Chooser, Sizes, Stays

SMALL = {"core": Core(vmem=64 * MIB, cores=2, rows=8), "interpret": True}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 rows, which pass by panels; with the options `SMALL`, in strips of 8."""
    monkeypatch.setattr(product_blocks, "ROW_BLOCKS", (16,))
    monkeypatch.setattr(product_blocks, "SIDES", ())
    monkeypatch.setattr(kernel_gradients, "ROW_BLOCK", 16)
    monkeypatch.setattr(kernel_gradients, "ROW_BLOCKS", (16,))
    monkeypatch.setattr(kernel_gradients, "STRIP", 8)


class Order(NamedTuple):
    """What stays in fast memory, see `product_blocks.Sizes`; of kernels 256 rows or columns pass by at a time."""

    stays: Stays
    shares: int
    split: int

    def plan(self, rows, shape, dtype, kernels, core, *, transposed=False, adds=True):
        """In the place of `plan_blocks`. What is no sum of terms that pass by takes panels."""
        chooser = Chooser(rows, shape, dtype, kernels, core, transposed)
        width, depth = chooser.width, chooser.length
        stays = Stays.ROWS if self.stays is Stays.SUMS and not adds else self.stays
        # Of rows that pass by, a share has two blocks.
        blocks = self.shares * (2 if stays is Stays.PANEL else 1)
        block = round_up(-(-rows // blocks), core.rows)
        assert -(-rows // block) == blocks
        if stays is Stays.SUMS:
            assert depth % 256 == width % self.split == 0
            width, depth = width // self.split, 256
        elif width > 256:
            width = 256
        found = chooser.plan(Sizes(stays, block, self.shares, self.split, width, depth))
        assert found is not None and found.panels % self.split == 0
        return found


ORDERS = pytest.mark.parametrize(
    "order",
    [
        Order(Stays.PANEL, shares=2, split=1),
        Order(Stays.ROWS, shares=3, split=1),
        Order(Stays.ROWS, shares=1, split=2),
        Order(Stays.SUMS, shares=3, split=1),
        Order(Stays.SUMS, shares=2, split=2),
    ],
    ids=lambda order: f"{order.stays.name.lower()}-{order.shares}-{order.split}",
)


@pytest.fixture
def fused(small_blocks, monkeypatch):
    """Kernels that are made tile by tile are made in Pallas kernels, in interpret mode."""

    def choose(tiles, dtype, out, *, loops, tpu, gpu):
        tile = tiles.fused()
        assert not isinstance(tile, str), tile
        return partial(tpu, tile=tile, shape=tiles.shape, **SMALL)

    monkeypatch.setattr(synthesis, "_choose", choose)
    monkeypatch.setattr(gated, "_choose", lambda apart, dtype, out, *, tpu: partial(tpu, **SMALL))
