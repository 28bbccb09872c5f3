"""The least time of a step from its parts: what a chip sends, reads and multiplies, by hand for small numbers."""

import dataclasses

import jax
import pytest

from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError
from moe_jax.distributed.mesh_axes import AXES
from moe_jax.experts.over_mesh import FURTHER_ROUNDS
from moe_jax.planning.compile_only import allocations, check_fits
from moe_jax.planning.expected_step import placed_leaves
from moe_jax.planning.hlo import Transfer, largest_arrays, sums_by_kind, transfers
from moe_jax.planning.step_time import StateNumbers, sending_seconds, step_roofline
from moe_jax.training.program import make_program
from moe_jax.training.recipe import MeshSection, ModelSection
from tests.support.training_models import FFN, config_of, moe, recipe_of

V5P, H100 = CHIPS["v5p"], CHIPS["h100"]


def test_groups_of_devices_are_read_in_both_ways_of_writing():
    text = f"""HloModule jit_step

%body (arg: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %rows = bf16[100,8]{{1,0}} ragged-all-to-all(%few, %many, %o, %s, %t, %r), replica_groups={{{{0,2}},{{1,3}}}}
}}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {{
  %one = bf16[16,8]{{1,0}} all-gather(%x), replica_groups={{{{0,4,8}},{{1,5,9}}}}, dimensions={{0}}
  %two = bf16[16,8]{{1,0}} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  %three = bf16[16,8]{{1,0}} all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %few = bf16[40,8]{{1,0}} parameter(1)
  %many = bf16[100,8]{{1,0}} parameter(2)
  %four = bf16[100,8]{{1,0}} ragged-all-to-all(%few, %many, %o, %s, %t, %r), replica_groups={{{{0,1}}}}
  %while.1 = (s32[], bf16[4,8]) while(%tuple), condition=%c, body=%body, metadata={{op_name="a/{FURTHER_ROUNDS}/while"}}
}}
"""
    assert transfers(text) == [
        Transfer("all-gather", 1, 256, (0, 4, 8)),
        Transfer("all-reduce", 1, 256, (0, 1, 2, 3)),
        Transfer("all-reduce", 1, 256, (0, 4)),
        Transfer("ragged-all-to-all", 1, 640, (0, 1)),  # what travels, and not the room that there is for it
    ]
    assert sums_by_kind(transfers(text))["all-reduce"].bytes == 512


def test_what_is_sent_takes_the_links_of_a_slice_or_the_network_between_hosts():
    gathered = Transfer("all-gather", 3, 400, (0, 1, 2, 3))
    assert sending_seconds(gathered, V5P, 8, None) == pytest.approx(300 / 200e9)
    assert sending_seconds(gathered._replace(kind="all-reduce"), V5P, 8, None) == pytest.approx(600 / 200e9)
    assert sending_seconds(gathered._replace(kind="collective-permute"), V5P, 8, None) == pytest.approx(400 / 200e9)
    assert sending_seconds(gathered._replace(group=()), V5P, 8, None) == pytest.approx(400 * 7 / 8 / 200e9)
    assert sending_seconds(gathered._replace(group=(5,)), V5P, 8, None) == 0
    assert sending_seconds(gathered, H100, 16, 8) == pytest.approx(300 / 450e9)
    assert sending_seconds(gathered._replace(group=(0, 4, 8, 12)), H100, 16, 8) == pytest.approx(300 / 50e9)


def test_the_longest_part_is_the_time():
    recipe = recipe_of(
        mesh=MeshSection(data=1, fsdp=8),
        model=ModelSection(config="c", init="random", remat="full", compute_dtype="bfloat16"),
    )
    program = make_program(recipe, config_of(FFN))
    assert "lm_head/kernel" in {leaf.path for leaf in placed_leaves(program, dict.fromkeys(AXES, 1))}
    size = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    replicated = sum(leaf.size for leaf in jax.tree.leaves(program.state.params) if leaf.sharding.is_fully_replicated)
    kept = (size - replicated) / 8 + replicated  # numbers of a chip
    sent = [Transfer("all-gather", 10, 8 * 10**6, tuple(range(8)))]
    state = StateNumbers.of(program)
    found = step_roofline(recipe, config_of(FFN), V5P, 6e6, state, 1000, sent, 8, None)
    assert found.matrix == pytest.approx(8e6 / 459e12)
    # Read three times in bfloat16; parameters, two moments and gradients in float32 read and written.
    assert found.memory == pytest.approx((3 * 2 * size + 2 * 4 * 4 * kept + 2 * 1000 + 2 * 4) / V5P.bandwidth, rel=1e-3)
    assert found.links == pytest.approx(10 * 7e6 / 200e9)
    assert (found.seconds, found.bound) == (found.links, "links")
    assert found.utilisation == pytest.approx(6e6 / 459e12 / found.seconds)
    assert step_roofline(recipe, config_of(FFN), V5P, 6e15, state, 1000, sent, 8, None).bound == "matrix units"
    # With microbatches, what auxiliary losses need is computed first, forward.
    divided = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, accumulation=2))
    dense, first = (
        step_roofline(divided, config_of(one), V5P, 6e6, state, 1000, sent, 8, None) for one in (FFN, moe())
    )
    assert dense.matrix == found.matrix and first.matrix == pytest.approx(10e6 / 459e12)
    assert first.memory - dense.memory == pytest.approx(2 * 2 * state.used / V5P.bandwidth)
    unknown = step_roofline(recipe, config_of(FFN), CHIPS["v4"], 6e6, state, 1000, sent, 8, None)
    assert unknown.links is None and unknown.bound == "memory"


def test_the_largest_arrays_are_named():
    message = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 16.50G of 15.75G hbm.
  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(step)/while/body/transpose/dot_general" source_file="x.py"
     Shape: f32[8,4096,32768]{2,1,0:T(8,128)}
     Unpadded size: 4.00G
  2. Size: 512.0M
     Shape: bf16[16,1024]{1,0}
"""
    assert allocations(message) == [
        "4.00G f32[8,4096,32768] of body/transpose/dot_general",
        "512.0M bf16[16,1024]",
    ]
    listed = "".join(f"\n  {i}. Size: {i}.00G\n     Shape: f32[{i}]" for i in range(1, 6))
    assert allocations(listed) == ["1.00G f32[1]", "2.00G f32[2]", "3.00G f32[3]"]
    assert allocations(listed, 1) == ["1.00G f32[1]"] and allocations("Ran out of memory") == []


def test_a_step_that_is_too_large_ends_with_its_largest_arrays():
    text = """HloModule jit_step

%fused (p: f32[4]) -> f32[9999] {
  ROOT %inside = f32[9999]{0} broadcast(%p)
}

%body (arg: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %scores = f32[512,512]{1,0:T(8,128)} fusion(%arg), calls=%fused, metadata={op_name="jit(step)/a/b/softmax"}
  %again = f32[512,512]{1,0} copy(%scores)
}

ENTRY %main (x: bf16[1024,1024]) -> bf16[4,8] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %kernels = bf16[256,256]{1,0} all-gather(%x), replica_groups={}
  %w = (s32[], bf16[4,8]) while(%t), condition=%c, body=%body
}
"""
    arrays = largest_arrays(text)
    assert arrays == ["1 MiB f32[512,512] of a/b/softmax", "0 MiB bf16[256,256] of all-gather"]
    sizes = {"total": 3 * 2**30, "hbm": 2 * 2**30}
    report = {"topology": "v5e:2x2", "bytes": sizes, "fits": False, "largest": arrays}
    with pytest.raises(InputError, match=r"v5e:2x2: it needs 3.00 GiB of the 2.00 GiB of a chip; .* a/b/softmax"):
        check_fits(report)
    check_fits(report | {"fits": True})
