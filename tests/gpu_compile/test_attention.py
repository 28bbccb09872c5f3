"""Attention in programs for GPUs is a flash kernel, forward and backward, and holds nothing as large as its scores."""

import contextlib
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts.devices import BATCH_AXES, attention_placement
from moe_jax.functional.attention import Visibility, attention
from moe_jax.planning.planned_devices import described_devices
from tests.gpu_compile.compiling import Program, needs_xla_gpu
from tests.support.uncached import uncached

pytestmark = needs_xla_gpu

CUDNN = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
TRITON = ["pallas_triton"] * 3

# Heads of queries, of keys, and their width.
LLAMA_3_8B, QWEN_1_7B, BERT = (32, 8, 128), (16, 8, 128), (12, 12, 64)


def program(heads, length, *, packed, mesh=None, known=True, dtype="bfloat16", **options):
    query_heads, key_heads, width = heads
    sizes = mesh or {}
    devices = described_devices(f"h100:{math.prod(sizes.values())}")
    made = make_mesh(sizes, devices)
    rows = made.size // made.shape["tensor"]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))

    def value(q, k, v, segments):
        visible = Visibility(positions, positions, *(segments, segments) if packed else ())
        y = attention(q, k, v, visible, aligned=True, placement=attention_placement(*q.shape[:2]), **options)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def given(dtype, *shape):
        spec = P(BATCH_AXES, None, *("tensor", None) * (len(shape) > 1))
        return jax.ShapeDtypeStruct((rows, length, *shape), dtype, sharding=NamedSharding(made, spec))

    operands = [given(dtype, count, width) for count in (query_heads, key_heads, key_heads)]
    # Without a mesh in use the platform is known only when the program is lowered.
    with uncached(), jax.set_mesh(made) if known else contextlib.nullcontext():
        done = jax.jit(jax.grad(value, argnums=(0, 1, 2))).lower(*operands, given("int32")).compile()
    return Program(done.as_text(), done.memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize(
    ("heads", "length", "options", "kernels"),
    [
        (LLAMA_3_8B, 4096, dict(packed=False), CUDNN),
        (LLAMA_3_8B, 4096, dict(packed=False, window=1024), CUDNN),
        (LLAMA_3_8B, 4096, dict(packed=False, mesh={"fsdp": 2, "tensor": 4}), CUDNN),
        (BERT, 1000, dict(packed=False, mask="bidirectional"), CUDNN),
        (QWEN_1_7B, 131_072, dict(packed=False), CUDNN),
        (LLAMA_3_8B, 4096, dict(packed=True), TRITON),
        (LLAMA_3_8B, 4096, dict(packed=True, mesh={"fsdp": 2, "tensor": 4}), TRITON),
        (BERT, 1000, dict(packed=True, mask="bidirectional"), TRITON),
        (QWEN_1_7B, 4096, dict(packed=False, known=False), [TRITON[0], *TRITON]),
        (QWEN_1_7B, 4096, dict(packed=True, known=False), [TRITON[0], *TRITON]),
        (QWEN_1_7B, 131_072, dict(packed=True, window=131_072), TRITON),
    ],
)
def test_attention_is_a_flash_kernel(heads, length, options, kernels):
    made = program(heads, length, **options)
    assert [kernel for kernel in made.kernels if "fmha" in kernel or "triton" in kernel] == kernels
    assert not made.dynamic_loops
    # Keys repeated for all heads, of rows filled up to whole blocks, are the largest there may be.
    assert max(math.prod(shape) for _, shape in made.arrays()) <= heads[0] * (length + 127) * heads[2]


def test_without_a_kernel_nothing_is_as_large_as_the_scores_either():
    chunks(BERT, packed=True, soft_cap=30.0)


def test_a_program_that_the_compiler_divides_has_no_kernel():
    chunks(BERT, packed=True, mesh={"fsdp": 2, "tensor": 2}, known=False)


def chunks(heads, **options):
    made = program(heads, 4096, **options)
    assert not [kernel for kernel in made.kernels if "fmha" in kernel or "triton" in kernel]
    assert max(math.prod(shape) for _, shape in made.arrays()) < heads[0] * 4096 * 4096 // 4
