"""The grouped product, forward and backward, is grouped in programs for GPUs, and holds nothing else."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.functional.grouped import grouped_matmul
from tests.gpu_compile.compiling import MIB, compiled, needs_xla_gpu, shape

pytestmark = needs_xla_gpu

# Rows, experts, fan-in and fan-out of one matrix.
SHAPES = {
    "Mixtral": (8192, 8, 4096, 14336),
    "OLMoE": (8192, 64, 2048, 1024),
    "Qwen3-30B": (8192, 128, 2048, 768),
    "Mixtral, one token": (2, 8, 4096, 14336),
    "no tile divides it": (1000, 5, 300, 211),
}


def forward_and_backward(lhs, rhs, group_sizes, dout):
    y, gradient = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, group_sizes), lhs, rhs)
    return y, gradient(dout)


def program(name, dtype="bfloat16", topology="h100:1"):
    rows, groups, fan_in, fan_out = SHAPES[name]
    return compiled(
        forward_and_backward,
        shape(rows, fan_in, dtype=dtype),
        shape(groups, fan_in, fan_out, dtype=dtype),
        shape(groups, dtype="int32"),
        shape(rows, fan_out, dtype=dtype),
        topology=topology,
    )


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("Mixtral", ["mosaic_gpu", "mosaic_gpu", "pallas_triton"]),
        ("OLMoE", ["mosaic_gpu", "mosaic_gpu", "pallas_triton"]),
        ("Qwen3-30B", ["mosaic_gpu", "mosaic_gpu", "pallas_triton"]),
        ("Mixtral, one token", ["pallas_triton"] * 3),
        ("no tile divides it", ["pallas_triton"] * 3),
    ],
)
def test_h100(name, kernels):
    found = program(name)
    assert sorted(found.kernels) == kernels
    assert not found.dynamic_loops
    # It was 3584 MiB for Mixtral when XLA made a dense product of it.
    assert found.temporaries <= 64 * MIB


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a100(dtype):
    found = program("OLMoE", dtype, "a100:1")
    assert found.kernels == ["pallas_triton"] * 3
    assert found.temporaries <= 64 * MIB


def test_float32_on_h100():
    found = program("OLMoE", "float32")
    assert found.kernels == ["pallas_triton"] * 3
    assert found.temporaries <= 64 * MIB


def test_xlas_own_lowering_is_dense():
    """If this fails, XLA has learnt it, and the kernels may have become superfluous."""
    rows, groups, fan_in, fan_out = SHAPES["OLMoE"]
    arguments = shape(rows, fan_in), shape(groups, fan_in, fan_out), shape(groups, dtype="int32")
    found = compiled(lambda lhs, rhs, sizes: jax.lax.ragged_dot(lhs, rhs, sizes).astype(jnp.bfloat16), *arguments)
    assert found.temporaries >= rows * fan_in * groups * 2 // 4
