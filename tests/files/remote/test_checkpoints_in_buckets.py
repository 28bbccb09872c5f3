"""Training checkpoints in a bucket, by Orbax: whatever listings show, and killed at any time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.checkpoints.saved_state import SavedState, read_steps
from moe_jax.core.errors import InputError
from moe_jax.files.storage_path import as_path

RUN = as_path("gs://bucket/run/checkpoints")


def state(step):
    mesh = jax.make_mesh((4,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return {"kernel": jax.device_put(jnp.arange(32.0).reshape(8, 4) + step, rows), "key": jax.random.key(step)}


LIKE = jax.eval_shape(lambda: {"kernel": jnp.zeros((8, 4)), "key": jax.random.key(0)})


@pytest.mark.parametrize("delay", [0, 1000], ids=["lists at once", "lists much later"])
def test_checkpoints_are_kept_and_restored(bucket, delay):
    bucket.delay = delay
    checkpoints = TrainingCheckpoints(RUN, keep=2, in_slices=lambda name: name == "kernel")
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"position": step})
    assert checkpoints.steps() == [2, 3]
    checkpoints.close()
    again = TrainingCheckpoints(RUN, keep=2)
    assert again.latest_step() == 3
    restored, extra = again.restore(3, LIKE)
    np.testing.assert_array_equal(restored["kernel"], state(3)["kernel"])
    assert jax.random.key_data(restored["key"]).tolist() == [0, 3] and extra == {"position": 3}
    again.close()
    assert list(read_steps(RUN)) == [2, 3]
    saved = SavedState(read_steps(RUN)[2])
    np.testing.assert_array_equal(saved.read("kernel"), state(2)["kernel"])
    np.testing.assert_array_equal(saved.read("kernel", 5), np.asarray(state(2)["kernel"])[5])


def test_a_checkpoint_that_was_not_finished_does_not_count(bucket):
    checkpoints = TrainingCheckpoints(RUN, keep=2)
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    bucket.fault = lambda request: 403 if request.verb == "put" and "steps.json" in request.name else None
    checkpoints.save(2, state(2), {})
    with pytest.raises(InputError, match="steps.json: no permission"):
        checkpoints.wait()
    bucket.fault = None
    again = TrainingCheckpoints(RUN, keep=2)
    assert again.steps() == [1]
    assert len({name.split("/")[2] for name in bucket.names() if name.count("/") > 2}) == 1
    again.save(2, state(2), {})
    assert again.steps() == [1, 2]
    # The first one has stood still meanwhile, and goes on.
    checkpoints.save(3, state(3), {})
    with pytest.raises(InputError, match="process has saved"):
        checkpoints.wait()


def test_arrays_that_cannot_be_written_are_one_line(bucket):
    checkpoints = TrainingCheckpoints(RUN, keep=2)
    bucket.fault = lambda request: 403 if request.verb == "put" else None
    with pytest.raises(InputError, match="gs://bucket/run/checkpoints.*: no permission"):
        checkpoints.save(1, state(1), {})
    bucket.fault = lambda request: 403 if request.verb == "put" and "/c/" in request.name else None
    with pytest.raises(InputError, match="gs://bucket/run/checkpoints.*: no permission"):
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
