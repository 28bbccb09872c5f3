import hashlib
import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from moe_jax.core.errors import InputError
from moe_jax.models import ModelConfig
from moe_jax.upcycling import UpcycleSpec, moe_leaves, upcycled_config
from tests.support.dense_models import dense_config, random_leaves
from tests.support.numerics import from_csr

EXPERTS = 3


def upcycle_layer(dense: ModelConfig, delta: str, *, seed=0, layer=0, dtype=None) -> tuple[dict, dict]:
    """Leaves of an FFN and of the MoE made from it."""
    options = UpcycleSpec(experts=EXPERTS, every=1, delta=delta)
    moe = upcycled_config(dense, options).layers[0].mlp
    leaves = random_leaves(dense, dtype=dtype)
    prefix = "layers/0/mlp/"
    ffn = {path.removeprefix(prefix): leaf for path, leaf in leaves.items() if path.startswith(prefix)}
    return ffn, dict(moe_leaves(ffn, moe, UpcycleSpec(seed=seed), layer=layer))


def is_random(path: str) -> bool:
    return path.startswith("router") or path.endswith(("/a", "/columns"))


@pytest.mark.parametrize("gated", [True, False])
def test_full_experts_are_views_of_the_ffn(gated):
    ffn, moe = upcycle_layer(dense_config(gated=gated, bias=True), "full")
    assert moe.keys() == {"router/kernel", *(f"experts/{path}" for path in ffn)}
    for path, leaf in ffn.items():
        experts = moe[f"experts/{path}"]
        assert experts.shape == (EXPERTS, *leaf.shape) and experts.base is not None and experts.strides[0] == 0
        assert all(np.array_equal(expert, leaf) for expert in experts)


@pytest.mark.parametrize("delta", ["low-rank:5", "sparse:0.7"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_base_is_the_ffn_and_the_delta_is_zero(delta, gated):
    ffn, moe = upcycle_layer(dense_config(gated=gated, bias=True), delta)
    for path, leaf in ffn.items():
        name, kind = path.split("/")
        if kind == "bias":
            np.testing.assert_array_equal(moe[f"experts/{name}/bias"], np.stack([leaf] * EXPERTS))
            continue
        np.testing.assert_array_equal(moe[f"experts/base/{name}/kernel"], leaf)
        if delta.startswith("low-rank"):
            a, b = moe[f"experts/delta/{name}/a"], moe[f"experts/delta/{name}/b"]
            assert a.shape == (EXPERTS, leaf.shape[0], 5) and b.shape == (EXPERTS, 5, leaf.shape[1])
            assert np.abs(a).max() <= 1 / math.sqrt(leaf.shape[0]) and len(np.unique(a)) > 0.99 * a.size
            assert not b.any()
        else:
            columns, ends, values = (moe[f"experts/delta/{name}/{part}"] for part in ("columns", "row_ends", "values"))
            assert columns.shape == values.shape == (EXPERTS, round(leaf.size * 0.3))
            assert columns.dtype == np.uint16 and ends.dtype == np.int32
            for e in range(EXPERTS):
                positions = from_csr(columns[e], ends[e], leaf.shape)
                assert (np.diff(positions) > 0).all() and positions[0] >= 0 and positions[-1] < leaf.size
            assert not values.any()
    assert len(moe) == 1 + {"low-rank:5": 3, "sparse:0.7": 4}[delta] * (2 + gated) + (2 + gated)


def test_the_router_is_normal_with_a_small_deviation():
    _, moe = upcycle_layer(dense_config(d_model=512, dim=8), "full")
    router = moe["router/kernel"]
    assert router.shape == (512, EXPERTS)
    assert abs(router.std() - 0.02) < 0.002 and abs(router.mean()) < 0.002


@pytest.mark.parametrize("delta", ["full", "low-rank:5", "sparse:0.7"])
def test_dtypes_are_those_of_the_ffn(delta):
    _, moe = upcycle_layer(dense_config(bias=True), delta, dtype="bfloat16")
    for path, leaf in moe.items():
        places = {"columns": np.uint16, "row_ends": np.int32}
        assert leaf.dtype == places.get(path.rsplit("/", 1)[-1], ml_dtypes.bfloat16), path


@pytest.mark.parametrize("delta", ["full", "low-rank:5", "sparse:0.7"])
def test_draws_repeat_with_the_seed_and_differ_in_everything_else(delta):
    dense = dense_config(d_model=24, dim=24)  # square, so that all matrices could be drawn alike
    drawn = {}
    for seed, layer in ((0, 0), (0, 1), (1, 0), (2**40, 0)):
        _, moe = upcycle_layer(dense, delta, seed=seed, layer=layer)
        _, again = upcycle_layer(dense, delta, seed=seed, layer=layer)
        for path in filter(is_random, moe):
            np.testing.assert_array_equal(moe[path], again[path])
            experts = [moe[path]] if path.startswith("router") else moe[path]
            drawn |= {(seed, layer, path, e): expert.tobytes() for e, expert in enumerate(experts)}
    assert len(drawn) == 4 * (1 if delta == "full" else 1 + 3 * EXPERTS)
    for (key, one), (other, two) in itertools.combinations(drawn.items(), 2):
        assert one != two, (key, other)


def test_what_a_seed_gives_never_changes():
    """Also on other machines and with other versions of NumPy: a seed in a lineage would otherwise mean nothing."""
    digest = hashlib.sha256()
    for delta in ("full", "low-rank:5", "sparse:0.7", "sparse:0.99"):
        _, moe = upcycle_layer(dense_config(), delta, seed=3, layer=2)
        for path in filter(is_random, moe):
            drawn = moe[path]
            if path.endswith("/columns"):
                shape = moe[path.replace("/delta/", "/base/").replace("/columns", "/kernel")].shape
                places = zip(drawn, moe[path.replace("/columns", "/row_ends")], strict=True)
                drawn = np.stack([from_csr(columns, ends, shape) for columns, ends in places]).astype(np.int32)
            digest.update(drawn.tobytes())
    assert digest.hexdigest() == "1772b5ff6a3a416b0e160e7c071c9392c93eebd04436fc5f95f0c52f8c7c838c"


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed=-1 must not be"):
        upcycle_layer(dense_config(), "full", seed=-1)
