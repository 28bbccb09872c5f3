"""What was found out about layers stays until the job is done, and no longer."""

import os

import numpy as np
import pytest

from moe_jax.compression.analyses import AnalysisStore
from moe_jax.core.errors import InputError

JOB = {"options": {"keep": 0.25}}


def test_a_job_that_goes_on_finds_what_was_put(tmp_path):
    orders = np.arange(6, dtype=np.int32).reshape(2, 3)
    with pytest.raises(OSError), AnalysisStore(tmp_path / "out", JOB) as store:
        assert store.get(3) is None
        store.put(3, {"permutations": orders, "objective": np.float64(1.5)})
        raise OSError("the disk is full")
    assert os.listdir(tmp_path) == [".out.analysis"]
    with AnalysisStore(tmp_path / "out", JOB) as store:
        found = store.get(3)
        assert found["permutations"].dtype == np.int32 and np.array_equal(found["permutations"], orders)
        assert found["objective"] == 1.5 and store.get(4) is None
    assert not os.listdir(tmp_path)


def test_another_job_begins_anew(tmp_path):
    with pytest.raises(KeyboardInterrupt), AnalysisStore(tmp_path / "out", JOB) as store:
        store.put(0, {"a": np.zeros(2)})
        raise KeyboardInterrupt
    with AnalysisStore(tmp_path / "out", {"options": {"keep": 0.5}}) as store:
        assert store.get(0) is None


def test_bad_input_leaves_nothing(tmp_path):
    with pytest.raises(InputError), AnalysisStore(tmp_path / "out", JOB) as store:
        store.put(0, {"a": np.zeros(2)})
        raise InputError("weights are not finite")
    assert not os.listdir(tmp_path)


def test_two_jobs_at_once_are_refused(tmp_path):
    with AnalysisStore(tmp_path / "out", JOB):
        with pytest.raises(InputError, match="command is writing"), AnalysisStore(tmp_path / "out", JOB):
            pass
        assert os.listdir(tmp_path) == [".out.analysis"]
