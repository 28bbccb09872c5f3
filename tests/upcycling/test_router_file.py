"""Routers of a file of their own, and the other options that published stages take."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import load_model, model_leaves
from moe_jax.upcycling import UpcycleSpec, upcycled_config
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.moe_models import MemorySource
from tests.support.tiers import one_in

CONFIG = dense_config(num_layers=3)
D = CONFIG.d_model
MATRIX = np.random.default_rng(0).normal(size=(4, D)).astype(np.float32)
BIAS = np.arange(4, dtype=np.float32)
MED = {"experts": 4, "top_k": 1, "universal": "med", "router_bias": True, "every": 2, "first": 0}


@pytest.fixture(scope="module")
def dense():
    return moe_jax.Model(load_model(MemorySource(CONFIG, random_leaves(CONFIG))))


def routers(model):
    leaves = dict(model_leaves(model.decoder))
    return {path: np.asarray(leaf) for path, leaf in leaves.items() if "/router/" in path}


@one_in(2)
@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_all_layers_have_the_router_of_the_file(dense, tmp_path, kind):
    file, tensors = tmp_path / f"router.{kind}", {"fc1.weight": MATRIX, "fc1.bias": BIAS}
    if kind == "bin":
        torch.save({name: torch.tensor(array) for name, array in tensors.items()}, file)
    else:
        save_file(tensors, file)
    made = moe_jax.upcycle(dense, router_weights=file, **MED)
    assert made.config.moe_layers == (0, 2)
    found = routers(made)
    assert set(found) == {f"layers/{i}/mlp/router/{name}" for i in (0, 2) for name in ("kernel", "bias")}
    for i in (0, 2):
        np.testing.assert_array_equal(found[f"layers/{i}/mlp/router/kernel"], MATRIX.T)
        np.testing.assert_array_equal(found[f"layers/{i}/mlp/router/bias"], BIAS)
    options = made.source.lineage[-1]["options"]
    assert options["router_weights"] == str(file) and len(options["router_weights_sha256"]) == 64


def test_a_router_without_a_bias_leaves_step_0_as_it_is(dense, tmp_path):
    save_file({"weight": MATRIX.astype(np.float16)}, tmp_path / "r.safetensors")
    made = moe_jax.upcycle(dense, experts=4, every=1, router_weights=tmp_path / "r.safetensors", router_bias=True)
    measured = made.lineage[-1]["measured"]
    assert measured["step0_max_abs_difference"] <= measured["step0_allowed"]
    np.testing.assert_array_equal(routers(made)["layers/1/mlp/router/kernel"], MATRIX.T.astype(np.float16))
    assert not routers(made)["layers/1/mlp/router/bias"].any()


@pytest.mark.parametrize(
    ("tensors", "options", "named"),
    [
        ({"weight": MATRIX[:3]}, {}, f"[4, {D}]"),
        ({"weight": MATRIX, "other": MATRIX}, {}, "one matrix"),
        ({"weight": MATRIX, "bias": BIAS[:3]}, {"router_bias": True}, "a bias [4]"),
        ({"weight": MATRIX, "bias": BIAS}, {}, "--router-bias"),
        ({"weight": MATRIX * np.float32("nan")}, {}, "finite"),
        ({"weight": MATRIX.astype(np.int32)}, {}, "one matrix"),
    ],
)
def test_files_that_hold_no_router_are_refused(dense, tmp_path, tensors, options, named):
    save_file(tensors, tmp_path / "r.safetensors")
    with pytest.raises(InputError) as error:
        moe_jax.upcycle(dense, experts=4, router_weights=tmp_path / "r.safetensors", **options)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_what_does_not_go_together_is_refused(tmp_path, capsys):
    for options in ({"router_from": ("a", "b")}, {"universal": "coder"}, {"granularity": 2}):
        with pytest.raises(InputError, match="--router-weights"):
            UpcycleSpec(experts=2, router_weights="r.bin", **options)
    for options in ({"first": 0, "layers": (1,)}, {"capacity_rows": 2}):
        with pytest.raises(InputError, match="--first|--capacity"):
            UpcycleSpec(**options)
    write_model(tmp_path / "dense", CONFIG, random_leaves(CONFIG))
    given = ["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), "--router-weights", str(tmp_path / "none.bin")]
    assert cli.main(given) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "none.bin" in error and not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [(24, {"first": 0}, range(0, 24, 2)), (7, {"every": 3, "first": 1}, (1, 4)), (4, {}, (1, 3))],
)
def test_layers_are_counted_from_the_first(layers, options, expected):
    assert upcycled_config(dense_config(num_layers=layers), UpcycleSpec(**options)).moe_layers == tuple(expected)


def test_a_first_layer_that_is_not_there_is_refused():
    for first in (-1, 3):
        with pytest.raises(InputError, match="first"):
            upcycled_config(CONFIG, UpcycleSpec(first=first))
