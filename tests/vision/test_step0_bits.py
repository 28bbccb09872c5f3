"""At step 0 an upcycled model that sees says what the dense one says: to the bit, or to the bit but for rounding.

In float64 all banks give the logits of the dense model but for the last bits, which float32 cannot hold. In float32, a
low-rank bank does so to the bit, as its base is applied once. The outputs of two whole experts are weighted and added,
and round otherwise than one; so do those of sparse deltas, as far as the compiler does not join the steps.
"""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import moe_jax
from moe_jax.model_io.loading import load_model
from tests.support.dense_models import dense_config, random_leaves
from tests.support.environment import ROOT
from tests.support.moe_models import MemorySource
from tests.support.numerics import logits_of
from tests.support.seeing_models import BANKS, picture_batch, seeing
from tests.support.tiers import long, one_in

SHAPES: dict[str, dict[str, Any]] = {
    "gated": dict(num_layers=2),
    "wide": dict(num_layers=3, d_model=96, dim=200, gated=False, bias=True),
}


@one_in(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_low_rank_bank_gives_the_logits_of_the_dense_model_to_the_bit(shape):
    config = seeing(dense_config(**SHAPES[shape]))
    dense = moe_jax.Model(load_model(MemorySource(config, random_leaves(config))))
    moe = moe_jax.upcycle(dense, experts=4, top_k=2, every=1, step0_check=False, **BANKS["low-rank"])
    moe_jax.experts.set_strategy(moe.decoder, "factored")
    batch = picture_batch(config, 24, (2, 12), (5,))
    before, after = (
        np.asarray(logits_of(model.decoder, batch["tokens"], pixels=batch["pixels"], slots=batch["slots"]))
        for model in (dense, moe)
    )
    assert np.std(before) > 0.1
    np.testing.assert_array_equal(after, before)


@long
def test_all_banks_do_in_double_precision():
    program = [sys.executable, "-m", "tests.vision.in_double_precision"]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.keys() == BANKS.keys()
    for bank, seen in found.items():
        assert seen["differ"] == 0 and seen["largest"] < 1e-13 and seen["finer"] > 0.99, (bank, seen)
