"""Processes that work for another one end with it, however it ends."""

import re
import signal
import subprocess
import sys

import pytest

from tests.project.test_structure import modules_below
from tests.support.environment import ROOT

_PROGRAM = """
import sys, time
from moe_jax.core.worker_pool import worker_pool
with worker_pool(1, print, ("begun",)) as executor:
    working = executor.submit(time.sleep, 100)
    working.result()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_process_that_they_work_for(how):
    # Workers write where it does, so what it writes to is open for as long as any of them is there.
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(how)
    try:
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == -how


def test_processes_start_only_where_they_are_known_to_end():
    starts = re.compile(
        r"^ *(import|from) (subprocess|multiprocessing)\b|ProcessPoolExecutor|os\.(fork|posix_spawn|spawn)",
        re.MULTILINE,
    )
    found = {name for name, file in modules_below(ROOT).items() if starts.search(file.read_text())}
    # The first watches what it works for; the others have a limit on their processor time, and read until it ends.
    assert found == {"moe_jax.core.worker_pool", "moe_jax.core.template_sandbox", "moe_jax.peft.trained"}
