"""Writing a model to a bucket that lists late and fails, by commands that are killed."""

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.checkpoints.leaf_files import LeafReader
from moe_jax.core.errors import InputError
from moe_jax.files import remote_work
from moe_jax.files.staging import leftovers, remove_leftover
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from tests.files.remote.kills import killed_at, no_waiting  # noqa: F401
from tests.support.dense_models import dense_config, random_leaves
from tests.support.tiers import EVERY

MODEL = as_path("gs://bucket/models/dense")
CONFIG = dense_config(num_layers=1)
LEAVES = dict(list(random_leaves(CONFIG).items())[:3])
OTHER = {name: leaf + 1 for name, leaf in LEAVES.items()}


def job(leaves=LEAVES, **options):
    entry = {"command": "test", "options": options, "sources": []}
    given = {"tokenizer_files": (), "lineage": [entry], "leaves": leaves, "resume": True}
    written = []
    with ModelDirectoryWriter(MODEL, CONFIG, **given) as writer:
        for name, leaf in leaves.items():
            if name not in writer.done:
                writer.write({name: leaf})
                written.append(name)
    return written


def check_model(bucket, leaves=LEAVES):
    stored = LeafReader(MODEL / "params")
    assert stored.specs.keys() == leaves.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(stored.read(name), leaf)
    assert not [name for name in bucket.names() if ".dense." in name]


def is_there():
    """Whether a reader finds a model."""
    try:
        return open_source(MODEL) is not None
    except (InputError, FileNotFoundError):
        return False


@pytest.mark.parametrize(("delay", "step"), [(0, 11), (1000, 5)], ids=["lists at once", "lists much later"])
def test_killed_at_any_request_it_goes_on(bucket, monkeypatch, no_waiting, delay, step):  # noqa: F811
    for number in range(0, 1000, 1 if EVERY else step):
        bucket.objects.clear()
        bucket.delay = delay
        if not killed_at(number, job, monkeypatch):
            break
        if is_there():  # killed when all was done but tidying up
            assert number > 40
            with pytest.raises(InputError, match="already exists"):
                job()
            continue
        job()
        check_model(bucket)
    assert number > 20


def test_what_was_done_is_not_done_again(bucket, monkeypatch, no_waiting):  # noqa: F811
    bucket.delay = 1000
    names = list(LEAVES)
    writes = []

    def two_leaves():
        real = ModelDirectoryWriter.write

        def write(self, leaves):
            if len(writes) == 2:
                raise OSError("no more")
            writes.append(leaves)
            real(self, leaves)

        with monkeypatch.context() as patch:
            patch.setattr(ModelDirectoryWriter, "write", write)
            job()

    with pytest.raises(OSError, match="no more") as failed:
        two_leaves()
    assert "moe-jax clean gs://bucket/models/dense removes it" in failed.value.__notes__[0]
    assert job() == names[2:]
    check_model(bucket)


def test_another_job_begins_anew_whatever_listings_show(bucket, monkeypatch, no_waiting):  # noqa: F811
    for delay in (0, 1000):
        for number in (8, 14, 20):
            bucket.objects.clear()
            bucket.delay = delay
            assert killed_at(number, job, monkeypatch)
            # killed itself, and given again
            assert killed_at(number, lambda: job(OTHER, seed=1), monkeypatch)
            job(OTHER, seed=1)
            check_model(bucket, OTHER)


def test_requests_that_fail_for_a_moment_are_made_again(bucket):
    count = 0

    def fault(request):
        nonlocal count
        count += 1
        if count % 9 == 0:
            raise ConnectionError
        return {5: 503, 13: 429}.get(count % 17)

    bucket.fault = fault
    job()
    check_model(bucket)
    assert count > 40


def test_a_bucket_that_fails_for_long_is_one_line_and_the_work_is_kept(bucket, monkeypatch, no_waiting):  # noqa: F811
    monkeypatch.setenv("MOE_JAX_STORAGE_SECONDS", "0.5")
    puts = 0

    def fault(request):
        nonlocal puts
        puts += request.verb == "put" and "params" in request.name
        return 503 if puts > 4 else None

    bucket.fault = fault
    with pytest.raises(OSError, match="gs://bucket/models/dense/params.* not answered within 0.5 s"):
        job()
    bucket.fault = None
    assert not is_there()
    assert len(job()) < len(LEAVES)
    check_model(bucket)


def test_clean_removes_what_was_begun_and_nothing_that_is_finished(bucket, monkeypatch, no_waiting):  # noqa: F811
    for number in (18, 36):
        assert killed_at(number, job, monkeypatch)
        assert leftovers(MODEL) == leftovers(MODEL.parent) == [MODEL]
        remove_leftover(MODEL)
        assert bucket.names() == [] and leftovers(MODEL) == []
    job()
    whole = bucket.names()
    # killed between its last file and the end
    (MODEL.parent / ".dense.partial" / "job.json").write_text('{"job": "x", "beginning": "y"}')
    assert leftovers(MODEL) == [MODEL]
    remove_leftover(MODEL)
    assert bucket.names() == whole


def test_two_commands_do_not_write_one_model(bucket, monkeypatch):
    monkeypatch.setattr(remote_work, "SECONDS", 0.5)
    entry = {"command": "test", "options": {}, "sources": []}
    given = {"tokenizer_files": (), "lineage": [entry], "leaves": LEAVES, "resume": True}
    with pytest.raises(InputError, match="use by process"):
        with ModelDirectoryWriter(MODEL, CONFIG, **given) as writer:
            writer.write(dict(list(LEAVES.items())[:1]))
            job()
    assert bucket.names() == []  # the first one ended with the error


def test_a_lease_that_nobody_renews_is_taken_over_and_its_owner_stops(bucket, monkeypatch):
    monkeypatch.setattr(remote_work, "SECONDS", 0.5)
    monkeypatch.setattr(remote_work.Lease, "_renew", lambda self: None)  # it stands still
    first = remote_work.Lease(MODEL / "lease.json", MODEL)
    first.take()
    second = remote_work.Lease(MODEL / "lease.json", MODEL)
    second.take()
    for check in (first.check, first.check_clock):
        with pytest.raises(InputError, match="command's any more"):
            check()
    second.check()
    first.release()
    second.check()
    second.release()
    assert bucket.names() == []


def test_a_lease_is_renewed(bucket, monkeypatch):
    monkeypatch.setattr(remote_work, "SECONDS", 0.4)
    answers = iter([None, 412, None, 503] * 100)
    first = remote_work.Lease(MODEL / "lease.json", MODEL)
    first.take()
    bucket.fault = lambda request: next(answers) if request.verb == "put" else None
    with pytest.raises(InputError, match="is in use"):
        remote_work.Lease(MODEL / "lease.json", MODEL).take()
    bucket.fault = None
    first.check()
    first.release()
    assert bucket.names() == []
