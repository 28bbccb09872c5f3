"""A model that is upcycled, trained and asked for tokens on the GPU does what it does on the CPU, in float32."""

import json
import os
import subprocess
import sys

import pytest

from tests.on_gpu.measured import needs_gpu
from tests.support.environment import ROOT

pytestmark = needs_gpu

PROGRAM = """
import json, sys
import jax, numpy as np
import moe_jax
(delta,) = sys.argv[1:]
batches = [np.random.default_rng(seed).integers(0, 64, (4, 129)) for seed in range(5)]
recipe = {"train": {"steps": 5}, "optimizer": {"learning_rate": 1e-2}}
moe = moe_jax.upcycle(moe_jax.tiny_model(), delta=delta, experts=4, top_k=2)
losses = []
trained = moe_jax.train(recipe, moe, batches, on_step=lambda step: losses.append(step["loss"]))
said = moe_jax.generate(trained, [1, 2, 3], max_new_tokens=12).ids
print(json.dumps([jax.default_backend(), losses, said]))
"""


def run(platform, *arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment |= {"JAX_PLATFORMS": platform, "JAX_DEFAULT_MATMUL_PRECISION": "highest", "PYTHONPATH": ":".join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )}  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("delta", ["full", "low-rank:4", "sparse:0.9"])
def test_training_and_generation(delta):
    (_, expected, words), (backend, losses, said) = (run(platform, delta) for platform in ("cpu", "cuda"))
    assert backend == "gpu"
    assert losses == pytest.approx(expected, rel=1e-4)
    assert said == words
