"""Eight devices of one process and of two train alike, on every shape of mesh and with every kind of experts."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.support.environment import COMPILER_FLAGS, ROOT
from tests.support.mesh_losses import KINDS, SHAPES, STEPS, losses
from tests.support.tiers import long


@long  # `test_processes.py` trains on two processes what it trains on one
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_of_four_devices_train_as_one_of_eight(kind):
    assert len(SHAPES) == 20
    cases = [(kind, axes) for axes in SHAPES]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"{COMPILER_FLAGS} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.mesh_losses", json.dumps(cases)],
            env=environment | {"MOE_JAX_DISTRIBUTED": f"localhost:{port},2,{index}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    (out, said), (silent, _) = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0] and silent == "", said
    for (kind, axes), found in zip(cases, json.loads(out), strict=True):
        expected = losses(kind, axes)
        assert len(found) == len(expected) == STEPS
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4, err_msg=f"{kind} on {axes}")
        assert found[-1][0] < found[0][0]  # on the same batch: gradients count in what was compared
