"""The kernels compiled by the TPU compiler at the sizes of real models, on a machine without a TPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.support.environment import ROOT
from tests.support.tiers import EVERY

# Experts, [in, out] of their kernels, and rows: tokens of a step on one chip times the experts of a token.
MODELS = {
    "llama-2-7b": (8, 4096, 11008, 8192),
    "mixtral": (8, 4096, 14336, 8192),
    "olmoe": (64, 2048, 1024, 32768),
    "qwen3-30b": (128, 2048, 768, 32768),
}
GENERATIONS = ("v5e", "v5p", "v6e")
SHARED = {"gated_product", "grouped_product", "grouped_product_transposed"}
KERNELS = {
    "low-rank": SHARED | {"low_rank_gradients"},
    "full": SHARED | {"grouped_outer"},
    "2-bit": SHARED | {"reduced_outer"},
    "3-bit": SHARED | {"reduced_outer"},
    "nf4": SHARED,
    "factored": {"low_rank_hidden"},
}

ALL = [f"{generation}:{kind}:{model}" for generation in GENERATIONS for kind in KERNELS for model in MODELS]
# `tests/planning/test_compile_only.py` compiles a whole step for v5e.
SOME = ["v6e:2-bit:qwen3-30b"]
CASES = ALL if EVERY else SOME


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """Compiles all cases in one process, which keeps no programs of the TPU's."""
    clean = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    arguments = []
    for case in CASES:
        generation, kind, model = case.split(":")
        arguments.append(":".join([generation, kind, *map(str, MODELS[model])]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.tpu.compile_for_tpu", *arguments],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which holds the TPU compiler, is not installed; there are wheels for Linux on x86 only",
)
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_and_hold_no_kernel_of_all_experts(case, compiled):
    _, kind, model = case.split(":")
    experts, fan_in, fan_out, rows = MODELS[model]
    found = compiled[case]
    assert set(found["kernels"]) == KERNELS[kind]
    assert found["loops"] == 0
    if kind == "factored":
        # A row of each product per token, none per expert: with the base, into the hidden layer and summed over its
        # experts; with the first factors, and the sum in float32 and as two terms. The product of `down` with the base
        # and that with the second factors are one.
        top_k = 2 if experts == 8 else 8
        tokens, inner = rows // top_k, 16 * experts
        per_token = 2 * (3 * fan_out + fan_in) + inner * (2 * 2 + 4 + 2 * 2)
        assert found["temporaries"] <= tokens * per_token
        return
    # One kernel in float32, as a sum over all rows has it; the kernels of all experts would be E times half of that.
    # Scales are in float32: the gradient of a quantised delta's until it is rounded, and those of NF4, which are
    # made from their codes before a kernel is called.
    rows_of_scales = {"2-bit": fan_in // 128, "3-bit": fan_in // 128, "nf4": fan_in // 64}.get(kind, 0)
    scales = 4 * experts * rows_of_scales * fan_out
    assert found["temporaries"] <= 4 * fan_in * fan_out + scales < 2 * experts * fan_in * fan_out
    # A product of all rows, its gradients of rows, of experts and of a base, two gated ones, and none for each expert.
    assert found["flops"] < 1.1 * 6 * 2 * rows * fan_in * fan_out
