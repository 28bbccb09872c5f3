"""`train --compile-only` for GPUs."""

import json

import pytest

from tests.gpu_compile.compiling import needs_xla_gpu
from tests.planning.test_compile_only import WIDTH, compile_for, folder  # noqa: F401  (a fixture)
from tests.support.tiers import long

pytestmark = needs_xla_gpu


@pytest.mark.parametrize(
    ("topology", "kind", "memory"),
    [
        ("h100:2x8", "NVIDIA H100 80GB HBM3", 84_942_979_072),
        pytest.param("h200:2x8", "NVIDIA H200", 151_397_597_184, marks=long),
        ("b200:2x8", "NVIDIA B200", 191_514_411_008),
    ],
)
def test_the_step_compiles_for_two_hosts_of_gpus(folder, topology, kind, memory):  # noqa: F811
    ((code, out, err),) = compile_for(folder, (topology,))
    assert code == 0, err
    report = json.loads(out)
    assert report["chips"] == 16 and report["device_kind"] == kind
    assert report["mesh"] == {"data": 1, "fsdp": 4, "expert": 4, "sequence": 1, "tensor": 1}
    sizes = report["bytes"]
    params = 2 * (4 * WIDTH * WIDTH + WIDTH * 4 + 4 * 2 * WIDTH * WIDTH + 2 * WIDTH) + 2 * 256 * WIDTH + WIDTH
    assert 3 * 4 * params / 16 < sizes["arguments"] < 3 * 4 * params / 4
    assert sizes["arguments"] < sizes["total"] < sizes["hbm"] == memory
    assert report["collectives"]["all-gather"]["count"] > 0 and report["collectives"]["reduce-scatter"]["count"] > 0


@pytest.mark.parametrize("topology", ["h100:", "h100:0x8", "h100:2x2x8", "h100:eight"])
def test_an_unknown_topology_is_one_line(folder, topology):  # noqa: F811
    ((code, _, err),) = compile_for(folder, (topology,))
    error = [line for line in err.splitlines() if line.startswith("moe-jax: error:")]
    assert code == 2 and len(error) == 1 and "expected for example h100:8 or h100:2x8" in error[0]
