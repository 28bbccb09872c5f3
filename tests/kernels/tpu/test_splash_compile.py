"""Attention compiles for TPU chips that are not there, calls the kernels, and holds nothing as large as its scores."""

import contextlib
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts.devices import BATCH_AXES, attention_placement
from moe_jax.functional.attention import Visibility, attention
from moe_jax.planning.planned_devices import prepare_environment
from tests.support.tiers import long, one_in
from tests.support.uncached import uncached

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")

# Heads of queries, of keys, and the widths of keys and values.
LLAMA_3_8B, QWEN_1_7B, GEMMA_2_9B = (32, 8, 128, 128), (16, 8, 128, 128), (16, 8, 256, 256)
DEEPSEEK_V2 = (16, 16, 192, 128)
ONE, FOUR = {}, {"fsdp": 2, "tensor": 2}


def compiled(topology, mesh, heads, length, dtype="bfloat16", known=True, **options):
    """Forward and backward of attention in packed rows, one for each device that splits the batch.

    Without a mesh in use the platform is known only when the program is lowered.
    """
    from jax.experimental import topologies

    prepare_environment()
    query_heads, key_heads, width, value_width = heads
    chips = list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    made = make_mesh(mesh, chips[: math.prod(mesh.values())])
    rows = made.size // made.shape["tensor"]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))

    def value(q, k, v, segments):
        prefix = jnp.ones(rows, jnp.int32) if options.get("mask") == "prefix" else None
        visible = Visibility(positions, positions, segments, segments, prefix)
        y = attention(q, k, v, visible, aligned=True, placement=attention_placement(*q.shape[:2]), **options)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def given(dtype, *shape):
        spec = P(BATCH_AXES, None, *("tensor", None) * (len(shape) > 1))
        return jax.ShapeDtypeStruct((rows, length, *shape), dtype, sharding=NamedSharding(made, spec))

    operands = [given(dtype, query_heads, width), given(dtype, key_heads, width), given(dtype, key_heads, value_width)]
    with uncached(), jax.set_mesh(made) if known else contextlib.nullcontext():
        return jax.jit(jax.grad(value, argnums=(0, 1, 2))).lower(*operands, given("int32")).compile()


@one_in(11)
@pytest.mark.parametrize(
    ("topology", "mesh", "heads", "length", "options"),
    [
        ("v5e:2x2", ONE, (2, 1, 128, 128), 8192, {}),
        ("v5e:2x2", ONE, (2, 1, 128, 128), 131_072, {"known": False}),
        ("v5e:2x2", ONE, LLAMA_3_8B, 4096, {}),
        ("v5e:2x2", ONE, GEMMA_2_9B, 8192, {"window": 4096, "soft_cap": 50.0}),
        ("v5e:2x2", ONE, GEMMA_2_9B, 131_072, {"dtype": "float32"}),
        ("v5e:2x2", ONE, DEEPSEEK_V2, 4096, {}),
        ("v5e:2x2", ONE, (12, 12, 64, 64), 4096, {"mask": "bidirectional"}),
        ("v5p:2x2x1", FOUR, LLAMA_3_8B, 4096, {}),
        ("v5p:2x2x1", ONE, LLAMA_3_8B, 131_072, {}),
        ("v6e:2x2", FOUR, QWEN_1_7B, 4096, {}),
        ("v6e:2x2", ONE, QWEN_1_7B, 131_072, {}),
    ],
)
def test_attention_is_three_kernels_and_nothing_of_the_size_of_the_scores(topology, mesh, heads, length, options):
    text = compiled(topology, mesh, heads, length, **options).as_text()
    assert kernels(text) == {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}
    # The kernels keep the logarithms of sums as rows of 128.
    assert largest_array(text) <= heads[0] * length * max(128, *heads[2:])


@long
@pytest.mark.parametrize(
    ("mesh", "options"), [(FOUR, {"known": False}), (ONE, {"mask": "prefix"})], ids=["divided by the compiler", "mask"]
)
def test_without_a_kernel_nothing_is_as_large_as_the_scores_either(mesh, options):
    text = compiled("v5e:2x2", mesh, (4, 2, 128, 128), 4096, **options).as_text()
    assert not kernels(text)
    assert largest_array(text) < 4 * 4096 * 4096 // 4


def kernels(text):
    return set(re.findall(r"%(splash_mha_[a-z]+)\w*[.\d]* = .* custom-call\(", text))


def largest_array(text):
    arrays = [tuple(map(int, axes.split(","))) for axes in re.findall(r"\[([\d,]+)\]", text)]
    return max(map(math.prod, arrays))
