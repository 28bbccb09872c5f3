import hashlib
import math

import numpy as np
import pytest

from moe_jax.core.errors import InputError
from moe_jax.functional.codes import quantize_nf4
from moe_jax.model_io import tuned_base
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.tuned_base import LeavesOverBase, base_config, base_leaf, is_tuned, kernel_of, own_leaves
from moe_jax.peft.adapt import initial_leaves
from tests.support.dense_models import random_leaves, write_model
from tests.support.tuned_models import lora, model, moe, tuned_and_base

CASES = tuned_and_base()


@pytest.mark.parametrize("name", CASES)
def test_every_leaf_is_the_bases_or_new(name):
    tuned, base = CASES[name]
    assert base_config(tuned) == base and is_tuned(tuned) and not is_tuned(base)
    specs, below, new = leaf_specs(tuned), leaf_specs(base), set()
    for path, spec in specs.items():
        source = base_leaf(tuned, path)
        if source is None:
            new.add(path)
        elif kernel_of(path) is None:
            assert spec.shape == below[source].shape, path
        else:
            assert source.endswith("/kernel") and kernel_of(path).split("/")[-2] == source.split("/")[-2]
    assert new == own_leaves(tuned)
    # Nothing of the base is lost.
    assert {base_leaf(tuned, path) for path in specs.keys() - new} == set(below)
    assert all(base_leaf(base, path) == path for path in below) and not own_leaves(base)


def test_the_base_may_keep_its_nf4_kernels():
    tuned, base = CASES["PESC"]
    kept = base_config(tuned, keep_nf4=True)
    assert kept.layers[0].attention.nf4 and kept.layers[0].mlp.nf4 and kept.layers[1].mlp.nf4
    assert base_config(kept) == base and not own_leaves(kept)


@pytest.mark.parametrize("name", CASES)
def test_initial_leaves_add_nothing(name):
    tuned, _ = CASES[name]
    specs, leaves = leaf_specs(tuned), dict(initial_leaves(tuned, 3))
    assert leaves.keys() == own_leaves(tuned)
    for path, leaf in leaves.items():
        assert (leaf.shape, leaf.dtype) == (specs[path].shape, specs[path].dtype), path
        if path.endswith(("/b", "/up")):
            assert not leaf.any()
        elif path.endswith(("/a", "/down")):
            bound = 1 / math.sqrt(leaf.shape[-2])
            assert np.abs(leaf).max() <= bound and np.abs(leaf).mean() == pytest.approx(bound / 2, rel=0.3)
            assert len(np.unique(leaf)) > 0.99 * leaf.size
        else:
            assert leaf.std() == pytest.approx(0.02, rel=0.3)


def test_draws_repeat_with_the_seed_and_every_leaf_has_its_own():
    tuned, _ = CASES["PESC"]
    first, again, other = (dict(initial_leaves(tuned, seed)) for seed in (3, 3, 4))
    drawn = [path for path, leaf in first.items() if leaf.any()]
    assert all(np.array_equal(first[path], again[path]) for path in first)
    assert not any(np.array_equal(first[path], other[path]) for path in drawn)
    assert len({first[path].tobytes() for path in drawn}) == len(drawn)
    # Leaves that others do not move: what else is beside the base changes nothing.
    fewer = dict(initial_leaves(model(moe(router_lora=lora("router")), frozen_base=True), 3))
    more = dict(initial_leaves(CASES["PERFT-E and LoRA on the router"][0], 3))
    assert fewer and all(np.array_equal(more[path], leaf) for path, leaf in fewer.items())


def test_what_a_seed_gives_never_changes():
    leaves = dict(initial_leaves(CASES["PERFT-R beside NF4 experts"][0], 7))
    digest = hashlib.sha256(b"".join(leaves[path].tobytes() for path in sorted(leaves))).hexdigest()
    assert digest[:16] == "519aadb570d1a6b7"


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed=-1 must not be"):
        list(initial_leaves(CASES["PESC"][0], -1))


def test_kernels_are_quantised_once(tmp_path, monkeypatch):
    tuned, config = CASES["PERFT-R beside NF4 experts"]
    base = ModelDirectory(write_model(tmp_path / "base", config, random_leaves(config)))
    made = []
    monkeypatch.setattr(tuned_base, "quantize_nf4", lambda kernel: made.append(kernel) or quantize_nf4(kernel))
    paths = [path for path in leaf_specs(tuned) if base_leaf(tuned, path) is not None]
    kernels = {kernel_of(path) for path in paths} - {None}
    # Layer by layer, as files are read; and leaf by leaf over all layers, as a stacked model is loaded.
    for order in (paths, sorted(paths, key=lambda path: path.split("/")[-1])):
        made.clear()
        leaves = LeavesOverBase(tuned, base)
        read = {path: leaves.read(path) for path in order}
        assert len(made) == len(kernels) > 0
        for path, leaf in read.items():
            assert (leaf.shape, leaf.dtype) == (leaves.specs[path].shape, leaves.specs[path].dtype)
            expected = base.read(base_leaf(tuned, path))
            if kernel_of(path) is not None:
                expected = np.asarray(quantize_nf4(expected)[path.split("/")[-1]])
            assert leaf.tobytes() == expected.tobytes(), path
    assert all(path not in leaves.specs for path in own_leaves(tuned))
