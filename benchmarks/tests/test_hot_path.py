"""How `benchmarks/hot_path.py` counts what a compiled program moves."""

import pytest

from hbm.traffic import Traffic, traffic

TPU = """
HloModule m

%fused (p0: bf16[8,128], p1: s32[32]) -> bf16[32,128] {
  %p0 = bf16[8,128]{1,0} parameter(0)
  %p1 = s32[32]{0} parameter(1)
  ROOT %gather.1 = bf16[32,128]{1,0} gather(%p0, %p1), offset_dims={1}
}

ENTRY %main (x: bf16[8,128], i: s32[32], w: bf16[4,128,256]) -> bf16[32,256] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[32]{0:T(128)} parameter(1)
  %w = bf16[4,128,256]{2,1,0} parameter(2)
  %start = (s32[32]{0:T(128)S(1)}, s32[32]{0:T(128)}, u32[]{:S(2)}) copy-start(%i)
  %done = s32[32]{0:T(128)S(1)} copy-done(%start)
  %rows = bf16[32,128]{1,0:T(8,128)(2,1)} fusion(%x, %done), kind=kCustom, calls=%fused
  %kernel = bf16[32,256]{1,0} custom-call(%rows, %w), backend_config={"scoped_memory_configs":[{"memory_space":"1",\
"offset":"0","size":"4096"}],"custom_call_config":{"cost_estimate":{"flops":"7","bytes_accessed":"300000"}}}
  %near = bf16[32,256]{1,0:S(1)} add(%kernel, %kernel)
  ROOT %out = bf16[32,256]{1,0} negate(%near)
}
"""


def test_what_a_tpu_program_moves():
    copied = 32 * 4
    gathered = 2 * 32 * 128 * 2
    added, negated = 2 * 32 * 256 * 2, 32 * 256 * 2
    assert traffic(TPU) == Traffic(copied + gathered + 300_000 + added + negated, 300_000, 4096)


IN_PLACE = """
HloModule m

%fused (p0: bf16[64,128], p1: bf16[64,128]) -> bf16[64,128] {
  %p0 = bf16[64,128]{1,0:S(1)} parameter(0)
  %p1 = bf16[64,128]{1,0} parameter(1)
  %first = bf16[16,128]{1,0} slice(%p1), slice={[0:16], [0:128]}
  %second = bf16[16,128]{1,0} slice(%p1), slice={[16:32], [0:128]}
  %sum = bf16[16,128]{1,0} add(%first, %second)
  %zero = s32[] constant(0)
  ROOT %update = bf16[64,128]{1,0:S(1)} dynamic-update-slice(%p0, %sum, %zero, %zero)
}

ENTRY %main (x: bf16[64,128], y: bf16[64,128], z: bf16[16,128], i: s32[]) -> bf16[64,128] {
  %x = bf16[64,128]{1,0:S(1)} parameter(0)
  %y = bf16[64,128]{1,0} parameter(1)
  %z = bf16[16,128]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %near = bf16[64,128]{1,0:S(1)} fusion(%x, %y), kind=kLoop, calls=%fused
  ROOT %far = bf16[64,128]{1,0} dynamic-update-slice(%y, %z, %i, %i)
}
"""


def test_what_is_written_into_a_part_of_an_array():
    """The sum is read from memory and stays in fast memory; what is as large as the array is not the array."""
    part, index = 16 * 128 * 2, 4
    assert traffic(IN_PLACE).moved == 2 * part + 2 * part + 2 * index


GPU = """
HloModule m

%body (c: (bf16[64,16], bf16[3,16,8], bf16[64,8])) -> (bf16[64,16], bf16[3,16,8], bf16[64,8]) {
  %c = (bf16[64,16]{1,0}, bf16[3,16,8]{2,1,0}, bf16[64,8]{1,0}) parameter(0)
  %rows = bf16[64,16]{1,0} get-tuple-element(%c), index=0
  %codes = bf16[3,16,8]{2,1,0} get-tuple-element(%c), index=1
  %before = bf16[64,8]{1,0} get-tuple-element(%c), index=2
  %made = bf16[16,8]{1,0} dynamic-slice(%codes), dynamic_slice_sizes={1,16,8}
  %out = bf16[64,8]{1,0} custom-call(%rows, %made, %before), custom_call_target="kernel"
  ROOT %next = (bf16[64,16]{1,0}, bf16[3,16,8]{2,1,0}, bf16[64,8]{1,0}) tuple(%rows, %codes, %out)
}

ENTRY %main (c: (bf16[64,16], bf16[3,16,8], bf16[64,8])) -> (bf16[64,16], bf16[3,16,8], bf16[64,8]) {
  %c = (bf16[64,16]{1,0}, bf16[3,16,8]{2,1,0}, bf16[64,8]{1,0}) parameter(0)
  ROOT %loop = (bf16[64,16]{1,0}, bf16[3,16,8]{2,1,0}, bf16[64,8]{1,0}) while(%c), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_the_turns_of_a_loop_over_experts_share_the_rows():
    kernel = 16 * 8 * 2
    # A kernel is sliced and written, then read; rows and results are those of all turns.
    assert traffic(GPU).moved == 3 * (3 * kernel) + 64 * 16 * 2 + 64 * 8 * 2


def test_a_loop_of_unknown_length_is_not_guessed():
    with pytest.raises(ValueError, match="loop: what a while"):
        traffic(GPU.replace('{"known_trip_count":{"n":"3"}}', "{}"))
