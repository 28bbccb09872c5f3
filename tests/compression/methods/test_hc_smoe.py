"""`hc-smoe`: clusters of experts by their mean outputs, and what is merged of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression import compress, make_method
from moe_jax.compression.methods import fewer_experts
from moe_jax.compression.methods.fewer_experts import cluster_by_distance, mean_outputs
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from tests.compression.methods.recorded_layers import TOKENS, calibration_of, recorded
from tests.compression.methods.test_baselines import D, F, experts_of, output
from tests.support.moe_models import memory_moe, run

E = 6
SHAPES = {"gated": {"d_model": D, "dim": F}, "plain": {"d_model": D, "dim": F, "gated": False, "bias": True}}


def source_of(shape: str = "gated"):
    return memory_moe(BankConfig(), noise=1.0, shape=SHAPES[shape], num_experts=E)


def clusters_as_published(points: np.ndarray, count: int) -> list[set[int]]:
    """Algorithm 1: the two clusters of least mean distance between their members become one, again and again."""
    clusters = [{i} for i in range(len(points))]
    while len(clusters) > count:
        pairs = [(a, b) for a in range(len(clusters)) for b in range(a)]
        distance = {
            (a, b): np.mean([np.linalg.norm(points[i] - points[j]) for i in clusters[a] for j in clusters[b]])
            for a, b in pairs
        }
        a, b = min(pairs, key=lambda pair: distance[pair])
        clusters[b] |= clusters.pop(a)
    return clusters


@settings(max_examples=20)
@given(n=st.integers(1, 9), share=st.floats(0.05, 1), seed=st.integers(0, 1000))
def test_clusters_are_united_by_their_mean_distance(n, share, seed):
    points = np.random.default_rng(seed).standard_normal((n, 3))
    count = max(1, round(share * n))
    found = cluster_by_distance(points, count)
    members = {frozenset(np.flatnonzero(found == cluster)) for cluster in range(count)}
    assert members == {frozenset(cluster) for cluster in clusters_as_published(points, count)}


def test_equal_points_still_make_as_many_clusters():
    assert sorted(set(cluster_by_distance(np.zeros((5, 3)), 2))) == [0, 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [TOKENS + 1, 100])
def test_outputs_are_averaged_over_tokens_of_all_experts(shape, most, monkeypatch):
    monkeypatch.setattr(fewer_experts, "MOST_TOKENS", most)
    source = source_of(shape)
    known = recorded(source)
    layer = SourceLayer(source, 0, calibration=known)
    assert known.rows is not None
    x = known.rows.inputs.astype(np.float64)
    taken = x if most > TOKENS else x[np.round(np.arange(most) * (TOKENS - 1) / (most - 1)).astype(int)]
    expected = [output(expert, taken).mean(axis=0) for expert in experts_of(layer)]
    np.testing.assert_allclose(mean_outputs(layer), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cluster_becomes_the_mean_weighted_by_usage(shape, tmp_path):
    source = source_of(shape)
    known = recorded(source, unused=1)
    assert known.rows is not None
    before = experts_of(SourceLayer(source, 0))
    x = known.rows.inputs.astype(np.float64)
    means = np.stack([output(expert, x).mean(axis=0) for expert in before])
    usage = known.statistics.usage
    report = compress(
        source, tmp_path / "out", make_method("hc-smoe", {"keep": 0.5}),
        calibration=calibration_of(known, tmp_path), described={},
    )  # fmt: skip
    out = ModelDirectory(tmp_path / "out")
    groups, after = out.read("layers/0/mlp/groups"), experts_of(SourceLayer(out, 0))
    expected = clusters_as_published(means, 3)
    assert {frozenset(np.flatnonzero(groups == g)) for g in range(3)} == {frozenset(one) for one in expected}
    assert max(map(len, expected)) > 1 and out.config.moe(0).num_experts == E
    dominant = [max(np.flatnonzero(groups == g), key=lambda e: usage[e]) for g in range(3)]
    assert dominant == sorted(dominant)
    for g, merged in enumerate(after):
        members = np.flatnonzero(groups == g)
        share = usage[members] / usage[members].sum() if usage[members].sum() else np.ones(len(members)) / len(members)
        for name, array in merged.items():
            mean = sum(w * before[e][name] for w, e in zip(share, members, strict=True))
            np.testing.assert_allclose(array, mean, rtol=1e-4, atol=1e-5)
    assert report.layers[0].uniform_usage is False and not report.warnings
    np.testing.assert_array_equal(out.read("layers/0/mlp/router/kernel"), source.leaves["layers/0/mlp/router/kernel"])


def test_what_is_merged_already_is_merged_again(tmp_path):
    source = source_of()
    for folder, keep in (("once", 0.67), ("twice", 0.5)):
        (tmp_path / folder).mkdir()
        calibration = calibration_of(recorded(source), tmp_path / folder)
        method = make_method("hc-smoe", {"keep": keep})
        compress(source, tmp_path / folder / "out", method, calibration=calibration, described={})
        source = ModelDirectory(tmp_path / folder / "out")
    assert source.config.moe(0).merged_experts == 2 and source.read("layers/0/mlp/groups").shape == (E,)


def test_needs_a_text_and_no_universal_expert():
    method = make_method("hc-smoe", {"keep": 0.5})
    with pytest.raises(InputError, match="give one with --calibrate TEXT"):
        method.check([SourceLayer(source_of(), 0)])
    beside = memory_moe(BankConfig(), shape=SHAPES["gated"], universal="med")
    with pytest.raises(InputError, match="--extended does not go"):
        method.check([SourceLayer(beside, 0, with_universal=True)])


def test_on_the_command_line(models, tmp_path, out_of, text, failing):
    options = ("--method", "hc-smoe", "--keep", 0.67)
    assert "give one with --calibrate TEXT" in failing(models["one"], tmp_path / "out", *options)
    calibrated = ("--calibrate", text, "--seq-len", 16, "--samples", 4, "--calibration-dir", tmp_path / "recorded")
    assert run(models["one"], tmp_path / "out", *options, *calibrated) == 0
    assert "nll" in out_of("eval", tmp_path / "out", "--text", text, "--seq-len", 48)
