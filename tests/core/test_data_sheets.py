"""The table of accelerators against the figures of its sources in their own units; and the memory of this machine."""

import os
import sys

import pytest

from moe_jax.core import data_sheets
from moe_jax.core.data_sheets import CHIPS, chip_of_kind

# Tflop/s of bfloat16; GB/s of the memory; its GiB; Gbit/s of all links of a chip in one direction, and axes of a torus.
TPUS = {
    "v4": (275, 1200, 32, 0, 1),
    "v5e": (197, 819, 16, 1600, 2),
    "v5p": (459, 2765, 95, 4800, 3),
    "v6e": (918, 1638, 32, 3200, 2),
    "v7x": (2307 / 2, 7380 / 2, 192 / 2, 0, 1),  # of half a chip
}
# Tflop/s of bfloat16 and float32; TB/s of the memory; its GB; GB/s of NVLink both ways; Gbit/s of a network adapter.
GPUS = {
    "a100": (312, 19.5, 2.04, 80, 600, 200),
    "h100": (1979 / 2, 67, 3.35, 80, 900, 400),  # the sheet counts products that sparsity saves
    "h200": (1979 / 2, 67, 4.8, 141, 900, 400),
    "b200": (36_000 / 8 / 2, 75, 61.4 / 8, 180, 1800, 400),
}


@pytest.mark.parametrize("name", TPUS)
def test_tpus_are_those_of_the_documents(name):
    chip, (bfloat16, bandwidth, memory, links, axes) = CHIPS[name], TPUS[name]
    assert (chip.platform, chip.memory, chip.network) == ("tpu", memory * 2**30, 0)
    assert (chip.bfloat16, chip.bandwidth) == pytest.approx((bfloat16 * 1e12, bandwidth * 1e9))
    assert chip.float32 == pytest.approx(chip.bfloat16 / 6)
    assert chip.link == pytest.approx(links * 1e9 / 8 / axes)
    assert (chip.vmem, chip.cores, chip.matrix_rows) == {
        "v5e": (2**27, 1, 128),
        "v5p": (2**26, 2, 128),
        "v6e": (2**27, 1, 256),
    }.get(name, (0, 1, 0))


@pytest.mark.parametrize("name", GPUS)
def test_gpus_are_those_of_the_data_sheets(name):
    chip, (bfloat16, float32, bandwidth, memory, nvlink, network) = CHIPS[name], GPUS[name]
    assert chip.platform == "gpu" and chip.memory == pytest.approx(memory * 1e9, rel=0.08)
    assert (chip.bfloat16, chip.float32) == pytest.approx((bfloat16 * 1e12, float32 * 1e12), rel=1e-3)
    assert chip.bandwidth == pytest.approx(bandwidth * 1e12, rel=2e-3)
    assert (chip.link, chip.network) == pytest.approx((nvlink * 1e9 / 2, network * 1e9 / 8))


def test_chips_are_found_by_what_jax_calls_them():
    assert CHIPS.keys() == {*TPUS, *GPUS, "cpu"} and all(name == chip.name for name, chip in CHIPS.items())
    for chip in CHIPS.values():
        assert chip.kinds and all(chip_of_kind(kind) is chip for kind in chip.kinds)
    assert chip_of_kind("TPU v5 lite") is CHIPS["v5e"] and chip_of_kind("TPU v5") is CHIPS["v5p"]
    assert chip_of_kind("abacus") is None


def test_numbers_of_up_to_two_bytes_are_multiplied_as_bfloat16():
    chip = CHIPS["h100"]
    assert [chip.operations_per_second(size) for size in (1, 2, 4)] == [chip.bfloat16, chip.bfloat16, chip.float32]


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_memory_is_in_bytes(tmp_path):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert data_sheets.total_memory() == pytest.approx(total, rel=0.01)
    assert 0 < data_sheets.available_memory() <= data_sheets.total_memory()
    before, block = data_sheets.resident_memory(), bytearray(b"x") * 2**25
    assert data_sheets.resident_memory() - before == pytest.approx(len(block), rel=0.3)
    assert data_sheets.resident_memory() <= data_sheets.peak_memory_bytes() < total
    status = tmp_path / "status"
    status.write_text("VmRSS2:\t7 kB\nVmRSS:\t  123 kB\n")
    assert data_sheets._in_kib(str(status), "VmRSS") == 123 * 1024
    assert data_sheets._in_kib(str(status), "VmHWM") is None and data_sheets._in_kib("/proc/none", "VmHWM") is None
