"""Experts that do not begin as plain copies: noise, and neurons drawn anew (methods.md 2.6)."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.core.draws import stream
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.upcycling import UpcycleSpec, moe_leaves, upcycled_config
from moe_jax.upcycling.expert_leaves import dropped_neurons, redrawn, with_noise
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.tiers import one_in

NEURON_AXIS = {"gate": 1, "up": 1, "down": 0}
PREFIX = "layers/0/mlp/"


def upcycle_layer(start: dict, *, seed=0, layer=0, experts=3, dtype=None, **dense) -> tuple[dict, dict]:
    """Leaves of an FFN and of the MoE made from it."""
    config = dense_config(**dense)
    leaves = random_leaves(config, dtype=dtype)
    spec = UpcycleSpec(experts=experts, every=1, seed=seed, **start)
    moe = upcycled_config(config, spec).moe(0)
    ffn = {path.removeprefix(PREFIX): leaf for path, leaf in leaves.items() if path.startswith(PREFIX)}
    return ffn, dict(moe_leaves(ffn, moe, spec, layer=layer))


def run(*arguments) -> int:
    return cli.main(["upcycle", *map(str, arguments)])


def lineage_of(path) -> dict:
    return json.loads((path / "lineage.json").read_text())[-1]


@given(st.floats(0.001, 2), st.integers(1, 5), st.integers(2, 40), st.integers(2, 40))
def test_noise_is_relative_to_the_kernel(relative, seed, rows, columns):
    kernel = np.random.default_rng(seed).normal(0.3, 0.7, (rows, columns)).astype(np.float32)
    noise = stream(seed).standard_normal(kernel.shape, np.float32)
    expected = kernel + relative * kernel.astype(np.float64).std() * noise
    found = with_noise(kernel, relative, stream(seed))
    assert found.dtype == np.float32 and found.shape == kernel.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 200), st.floats(0, 1), st.integers(0, 3))
def test_dropped_neurons_are_distinct_and_as_many_as_asked_for(count, share, seed):
    neurons = dropped_neurons(stream(seed), count, share)
    assert len(set(neurons.tolist())) == len(neurons) and all(0 <= neuron < count for neuron in neurons)
    assert share * count - 1 < len(neurons) <= share * count + 1e-6


@pytest.mark.parametrize("name", NEURON_AXIS)
def test_dropped_neurons_are_drawn_like_those_that_they_replace(name):
    """With the mean and deviation of the dropped part, which here are far from those of the rest."""
    kernel = np.random.default_rng(0).normal(0, 1, (400, 400)).astype(np.float32)
    neurons = np.arange(0, 400, 2)
    at = (slice(None), neurons) if NEURON_AXIS[name] else (neurons, slice(None))
    kernel[at] = 5 + 0.1 * kernel[at]
    found = redrawn(kernel, kernel, name, neurons, stream(1))
    part, rest = found[at], np.delete(found, neurons, axis=NEURON_AXIS[name])
    np.testing.assert_array_equal(rest, np.delete(kernel, neurons, axis=NEURON_AXIS[name]))
    assert abs(part.mean() - 5) < 0.01 and abs(part.std() - 0.1) < 0.002
    assert abs(np.corrcoef(part.ravel(), kernel[at].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("start", [dict(noise=0.1), dict(drop=0.5), dict(noise=0.1, drop=0.25)])
@pytest.mark.parametrize("gated", [True, False])
def test_only_kernels_of_experts_change(start, gated):
    ffn, moe = upcycle_layer(start, gated=gated, bias=True)
    _, plain = upcycle_layer(dict(), gated=gated, bias=True)
    assert moe.keys() == plain.keys()
    for path, leaf in moe.items():
        assert leaf.shape == plain[path].shape and leaf.dtype == plain[path].dtype
        if path.startswith("experts/") and path.endswith("/kernel"):
            assert len({expert.tobytes() for expert in leaf} | {plain[path][0].tobytes()}) == 4
        else:
            np.testing.assert_array_equal(leaf, plain[path])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("drop", [0.5, 0.3, 1.0])
def test_a_neuron_is_dropped_from_all_matrices_and_each_expert_has_its_own(gated, drop):
    ffn, moe = upcycle_layer(dict(drop=drop), gated=gated)
    dropped = []
    for expert in range(3):
        of_matrices = []
        for name, axis in NEURON_AXIS.items():
            if f"{name}/kernel" in ffn:
                same = np.equal(moe[f"experts/{name}/kernel"][expert], ffn[f"{name}/kernel"])
                kept = same.all(axis=1 - axis)
                assert np.array_equal(kept, same.any(axis=1 - axis))
                of_matrices.append(tuple(np.flatnonzero(~kept)))
        assert len(set(of_matrices)) == 1 and len(of_matrices[0]) == int(24 * drop)
        dropped.append(of_matrices[0])
    assert len(set(dropped)) == (1 if drop == 1 else 3)


@pytest.mark.parametrize("start", [dict(noise=0.1), dict(drop=0.5), dict(noise=0.1, drop=0.5)])
def test_draws_repeat_with_the_seed_and_differ_in_layers(start):
    drawn = {}
    for seed, layer in ((0, 0), (0, 1), (1, 0)):
        _, moe = upcycle_layer(start, seed=seed, layer=layer, d_model=24, dim=24)
        _, again = upcycle_layer(start, seed=seed, layer=layer, d_model=24, dim=24)
        for path in moe:
            np.testing.assert_array_equal(moe[path], again[path])
        drawn[seed, layer] = moe["experts/up/kernel"].tobytes()
    assert len(set(drawn.values())) == 3


def test_more_noise_changes_neither_what_is_dropped_nor_how_it_is_drawn():
    _, noisy = upcycle_layer(dict(noise=0.1, drop=0.5))
    _, clean = upcycle_layer(dict(drop=0.5))
    ffn, _ = upcycle_layer(dict())
    up, others = clean["experts/up/kernel"][0], noisy["experts/up/kernel"][0]
    dropped = ~np.equal(up, ffn["up/kernel"]).all(axis=0)
    np.testing.assert_array_equal(up[:, dropped], others[:, dropped])
    assert dropped.sum() == 12 and not np.equal(up[:, ~dropped], others[:, ~dropped]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"noise": -0.1}, "noise=-0.1 must .* least 0"), ({"drop": 1.5}, "drop=1.5 is a share")],
)
def test_bad_starts_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        UpcycleSpec(**options)


@pytest.mark.parametrize("delta", ["low-rank:2", "sparse:0.5"])
@pytest.mark.parametrize("start", [dict(noise=0.1), dict(drop=0.1)])
def test_a_delta_cannot_begin_with_it(delta, start):
    with pytest.raises(InputError, match="needs --delta full"):
        UpcycleSpec(delta=delta, **start)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--noise 0.1 --delta low-rank:4", "--noise needs --delta full"),
        ("--drop 0.5 --delta sparse:0.5", "--drop needs --delta full"),
        ("--drop 1.5", "drop=1.5 is a share of the neurons, at most 1"),
        ("--noise -1", "noise=-1.0 must be at least 0"),
        ("--noise nan", "--noise: expected a finite number"),
        ("--method pesc --drop 0.5 --adapter 2 --rest full", "--drop does not go with adapter experts"),
        ("--noise 0.1 --gate softmax_topk", "weights that do not sum to 1"),
    ],
)
def test_bad_options_of_the_command(options, message, dense_model, tmp_path, failing):
    assert message in failing(dense_model, tmp_path / "moe", *options.split())


@one_in(3)
@pytest.mark.parametrize(
    "options",
    ["--noise 0.05 --drop 0.5 --universal coder", "--noise 0.05", "--drop 0.5", "--capacity-factor 0.5"],
)
def test_the_command_says_how_far_off_step_0_is(options, dense_model, tmp_path, capsys):
    assert run(dense_model, tmp_path / "moe", "--experts", 3, "--layers", 0, 2, *options.split()) == 0
    assert "as is meant: " in capsys.readouterr().out
    entry = lineage_of(tmp_path / "moe")
    measured = entry["measured"]
    assert measured["step0_max_abs_difference"] > measured["step0_allowed"]
    expected = {
        "--noise": "noise 0.05",
        "--drop": "share 0.5",
        "--capacity-factor": "tokens beyond capacity_factor 0.5",
    }
    flags = options.split()
    assert measured["step0_differs"].startswith(expected[flags[0]])
    names = [name.lstrip("-").replace("-", "_") for name in flags[::2]]
    assert {name: str(entry["options"][name]) for name in names} == dict(zip(names, flags[1::2], strict=True))


@one_in(3)
@pytest.mark.parametrize("options", ["--drop 0 --delta low-rank:2", "--noise 0", "--drop 0"])
def test_nothing_is_equal_and_goes_with_everything(options, dense_model, tmp_path):
    assert run(dense_model, tmp_path / "moe", *options.split()) == 0
    measured = lineage_of(tmp_path / "moe")["measured"]
    assert measured["step0_max_abs_difference"] <= measured["step0_allowed"] and "step0_differs" not in measured


def test_kernels_that_are_not_finite_are_refused(tmp_path, failing):
    config = dense_config()
    leaves = random_leaves(config)
    leaves["layers/1/mlp/up/kernel"][0, 0] = np.inf
    source = write_model(tmp_path / "dense", config, leaves)
    flags = ("--noise", 0.1, "--allow-nonfinite", "--no-step0-check")
    assert "not finite, so that none can be drawn like them" in failing(source, tmp_path / "moe", *flags)


def test_stories260k_with_noise_is_near_its_dense_model(data_dir, tmp_path):
    source = data_dir / "weights" / "stories260K" / "hf"
    differences = []
    for std in (0.001, 0.01, 0.1):
        assert run(source, tmp_path / str(std), "--noise", std, "--every", 1, "--experts", 2) == 0
        differences.append(lineage_of(tmp_path / str(std))["measured"]["step0_max_abs_difference"])
    assert 1e-5 < differences[0] < 0.2 * differences[1] < 0.1 * differences[2]
    assert open_source(tmp_path / "0.1").config.moe_layers == (0, 1, 2, 3, 4)


def test_the_same_seed_writes_the_same_weights(dense_model, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(dense_model, tmp_path / name, "--noise", 0.1, "--drop", 0.5, "--seed", seed, "--no-step0-check") == 0
    a, b, c = (ModelDirectory(tmp_path / name).fingerprint() for name in "abc")
    assert a == b != c
