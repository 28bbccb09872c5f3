"""A model with everything in codes, in what models are used for: on many devices, trained, tuned, exported, served."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from tests.support.calibrated_codes import logits
from tests.support.numerics import assert_close, logits_of
from tests.support.tiers import long

MESHES = ({"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "expert": 2, "fsdp": 2})
RECIPE = {"optimizer": {"learning_rate": 1e-2}, "train": {"steps": 2}}


def leaves_of(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(model.source.read(path)) for path in model.source.specs()}


def gradients(model, windows):
    """The loss, and the gradients, of a decoder on its devices, with scales in float32 as they are trained."""
    tokens = jnp.asarray(windows)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    graphdef, params, rest = nnx.split(model.decoder, nnx.Param, ...)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return jax.jit(jax.value_and_grad(lambda params: nnx.merge(graphdef, params, rest).loss(batch)))(params)


@long
@pytest.mark.parametrize("mesh", MESHES)
def test_on_eight_devices_it_is_what_it_is_on_one(coded, windows, mesh):
    windows = windows[:8]
    there = moe_jax.load(coded, mesh=mesh)
    expected = logits(coded, windows), *gradients(moe_jax.load(coded), windows)
    with jax.set_mesh(there.mesh):
        assert_close((logits_of(there.decoder, jnp.asarray(windows)), *gradients(there, windows)), expected)
    before = leaves_of(there)
    trained = leaves_of(moe_jax.train({**RECIPE, "mesh": mesh}, coded, [windows] * 2))
    changed = {path for path, leaf in trained.items() if not np.array_equal(leaf, before[path])}
    scales = {path for path in before if path.endswith("/scales")}
    assert scales <= changed
    assert not any(path.endswith(("/codes", "/zeros")) for path in changed)
    assert all(np.isfinite(leaf).all() for path, leaf in trained.items() if path in changed)
