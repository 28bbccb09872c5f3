"""Merging baselines: groups, weights, aligned neurons, and fewer experts than outputs of the router."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.calibration.expert_statistics import statistics_of
from moe_jax.compression.calibration.recording import Calibration, LayerCalibration
from moe_jax.compression.methods.fewer_experts import count_groups, group_experts
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.spec import METHODS
from moe_jax.compression.stream import compress
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from moe_jax.nn.moe import RouterStatistics
from tests.compression.methods.test_baselines import D, F, compressed, design_of, experts_of, output, squared_error
from tests.support.moe_models import memory_moe

E = 6
MERGING = ("msmoe", "meo", "git-rebasin")
X = np.random.default_rng(7).standard_normal((5, D))
# Most used: 1, 4 and 2, in this order. Expert 0 is like 4, 3 like 1, 5 like 4; nothing is like 2.
STATISTICS = RouterStatistics(
    usage=np.array([0.05, 0.4, 0.15, 0.1, 0.25, 0.05]),
    score=np.array([0.1, 0.3, 0.15, 0.1, 0.25, 0.1]),
    similarity=np.array(
        [
            [1.0, 0.1, 0.2, 0.0, 0.9, 0.0],
            [0.1, 1.0, 0.0, 0.8, 0.1, 0.2],
            [0.2, 0.0, 1.0, 0.0, 0.0, 0.1],
            [0.0, 0.8, 0.0, 1.0, 0.1, 0.0],
            [0.9, 0.1, 0.0, 0.1, 1.0, 0.7],
            [0.0, 0.2, 0.1, 0.0, 0.7, 1.0],
        ]
    ),
)
CALIBRATION = LayerCalibration(STATISTICS)
GROUPS = [2, 0, 1, 0, 2, 2]


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def source(request):
    shape = {"d_model": D, "dim": F, "gated": request.param, "bias": not request.param}
    return memory_moe(BankConfig(), noise=1.0, shape=shape, num_experts=E)


def reordered(expert: dict[str, np.ndarray], order: np.ndarray) -> dict[str, np.ndarray]:
    return {
        name: array if name == "down/bias" else array[order] if name == "down" else array[..., order]
        for name, array in expert.items()
    }


def test_groups_are_around_the_most_used_experts():
    groups = group_experts(STATISTICS, 3)
    assert groups.dominant.tolist() == [1, 2, 4] and groups.of.tolist() == GROUPS
    assert group_experts(STATISTICS, 1).of.tolist() == [0] * E
    assert group_experts(STATISTICS, E).of.tolist() == list(range(E))
    uniform = STATISTICS._replace(usage=np.full(E, 1 / E))
    assert group_experts(uniform, 2).dominant.tolist() == [0, 1]


@settings(max_examples=30)
@given(experts=st.integers(1, 12), keep=st.floats(0.01, 1), seed=st.integers(0, 1000))
def test_groups_are_a_partition_with_one_dominant_expert_each(experts, keep, seed):
    random = np.random.default_rng(seed)
    statistics = RouterStatistics(
        random.dirichlet(np.ones(experts)), np.ones(experts), np.corrcoef(random.normal(size=(experts, 9))).reshape(
            experts, experts)
    )  # fmt: skip
    count = count_groups(experts, keep)
    assert 1 <= count <= experts
    of, dominant = group_experts(statistics, count)
    assert sorted(set(of)) == list(range(count)) and of[dominant].tolist() == list(range(count))
    least = statistics.usage[dominant].min()
    assert (np.delete(statistics.usage, dominant) <= least).all()


@pytest.mark.parametrize("name", MERGING)
def test_what_is_left_is_the_weighted_mean_of_the_aligned_experts(source, name):
    before = experts_of(SourceLayer(source, 0))
    layer, figures, analysis = compressed(source, METHODS[name](keep=0.5), calibration=CALIBRATION)
    assert layer.moe.merged_experts == 3 and layer.moe.num_experts == E
    assert layer.leaf("groups").tolist() == GROUPS and layer.leaf("groups").dtype == np.int32
    weights = {"msmoe": STATISTICS.usage, "meo": STATISTICS.score, "git-rebasin": np.ones(E)}[name]
    orders = analysis["permutations"]
    aligned = [reordered(expert, order) for expert, order in zip(before, orders, strict=True)]
    after = experts_of(layer)
    assert len(after) == 3
    for g, merged in enumerate(after):
        members = [e for e in range(E) if GROUPS[e] == g]
        for kernel, array in merged.items():
            mean = sum(weights[e] * aligned[e][kernel] for e in members) / weights[members].sum()
            np.testing.assert_allclose(array, mean, rtol=1e-4, atol=1e-5)
    error = squared_error(aligned, [after[g] for g in GROUPS])
    assert figures.error_per_neuron == pytest.approx(error / E / F, rel=1e-4)
    assert figures.uniform_usage is False and figures.choice == "1 3 | 2 | 0 4 5"
    # What is not merged is what it was.
    np.testing.assert_allclose(output(after[1], X), output(before[2], X), rtol=1e-4, atol=1e-5)


def test_progress_rises_with_every_expert(source):
    told = {}
    for name in ("msmoe", "git-rebasin"):
        layer = SourceLayer(source, 0, calibration=CALIBRATION)
        METHODS[name](keep=0.5).analyse(layer, told.setdefault(name, []).append)
    np.testing.assert_allclose(told["msmoe"], np.arange(1, E + 1) / E)
    # Nobody knows how many rounds there will be: each takes half of what is left.
    np.testing.assert_allclose(told["git-rebasin"][:E], 1 - 0.5 ** (np.arange(1, E + 1) / E))
    assert (np.diff(told["git-rebasin"]) > 0).all() and told["git-rebasin"][-1] < 1


def test_msmoe_aligns_to_the_dominant_expert(source):
    """No exchange of two neurons brings an expert nearer to it, and permuted copies are found."""
    before = experts_of(SourceLayer(source, 0))
    _, _, analysis = compressed(source, METHODS["msmoe"](keep=0.5), calibration=CALIBRATION)
    orders = analysis["permutations"]
    for dominant in (1, 2, 4):
        assert orders[dominant].tolist() == list(range(F))
    target, moved = design_of(before[4]), design_of(before[5])[orders[5]]
    scores = target @ moved.T
    for i, j in itertools.combinations(range(F), 2):
        assert scores[i, i] + scores[j, j] >= scores[i, j] + scores[j, i] - 1e-9


@pytest.mark.parametrize("name", ["msmoe", "git-rebasin"])
def test_experts_that_differ_in_order_only_are_merged_without_loss(name):
    source = memory_moe(BankConfig(), noise=1.0, shape={"d_model": D, "dim": F}, num_experts=4)
    random = np.random.default_rng(3)
    orders = [random.permutation(F) for _ in range(4)]
    for kernel in ("gate", "up", "down"):
        path = f"layers/0/mlp/experts/{kernel}/kernel"
        first = source.leaves[path][0]
        source.leaves[path] = np.stack([first[o] if kernel == "down" else first[:, o] for o in orders])
    layer, figures, _ = compressed(source, METHODS[name](keep=0.25))
    assert layer.moe.merged_experts == 1 and figures.relative_error < 1e-6
    np.testing.assert_allclose(
        output(experts_of(layer)[0], X), output(experts_of(SourceLayer(source, 0))[0], X), rtol=1e-4, atol=1e-5
    )
    if name == "git-rebasin":
        assert figures.converged and figures.rounds >= 1 and figures.objective < 1e-6
    # Where neurons stay as they are, the mean of experts in different order is none of them.
    assert compressed(source, METHODS["meo"](keep=0.25))[1].relative_error > 0.5


def test_without_a_text_the_router_says_who_is_alike(source):
    layer = SourceLayer(source, 0)
    columns = source.leaves["layers/0/mlp/router/kernel"].astype(np.float64)
    found = statistics_of(layer)
    np.testing.assert_allclose(found.usage, 1 / E)
    norms = np.linalg.norm(columns, axis=0)
    np.testing.assert_allclose(found.similarity, columns.T @ columns / np.outer(norms, norms), rtol=1e-9)
    _, figures, _ = compressed(source, METHODS["msmoe"](keep=0.5))
    assert figures.uniform_usage is True


def test_experts_of_a_group_that_is_never_used_are_weighted_alike(source):
    usage = np.where(np.isin(np.arange(E), [1, 4]), STATISTICS.usage, 0)
    analysis = METHODS["msmoe"](keep=0.5).analyse(
        SourceLayer(source, 0, calibration=LayerCalibration(STATISTICS._replace(usage=usage))), lambda share: None
    )
    unused = {g for g in range(3) if usage[analysis["groups"] == g].sum() == 0}
    assert unused and np.isfinite(analysis["weights"]).all()
    np.testing.assert_allclose(np.bincount(analysis["groups"], analysis["weights"]), 1)
    for g in unused:
        own = analysis["weights"][analysis["groups"] == g]
        np.testing.assert_allclose(own, 1 / len(own))


def test_merged_experts_can_be_merged_again(source):
    once, _, _ = compressed(source, METHODS["meo"](keep=0.5), calibration=CALIBRATION)
    twice, _, _ = compressed(once._source, METHODS["meo"](keep=0.6), calibration=CALIBRATION)
    assert twice.moe.merged_experts == 2 and twice.moe.num_experts == E
    found = statistics_of(SourceLayer(once._source, 0, calibration=CALIBRATION))
    np.testing.assert_allclose(found.usage, [0.5, 0.15, 0.35])  # of 1 3, of 2, of 0 4 5
    groups = np.array(group_experts(found, 2).of)
    assert twice.leaf("groups").tolist() == groups[GROUPS].tolist()


@pytest.mark.parametrize("name", MERGING)
def test_a_job_takes_the_statistics_of_its_layers(name, source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("All the world is a stage.")
    calibration = Calibration((text,), {0: CALIBRATION})
    report = compress(source, tmp_path / "out", METHODS[name](keep=0.5), calibration=calibration, described={})
    assert not any("--calibrate" in line for line in report.warnings)
    out = ModelDirectory(tmp_path / "out")
    assert out.read("layers/0/mlp/groups").tolist() == GROUPS
    assert out.specs()["layers/0/mlp/experts/up/kernel"].shape == (3, D, F)
