"""`ream`: which experts stay, which of them the others join, and what a group becomes; float64 NumPy beside it."""

import dataclasses

import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.alignment.assignment import align
from moe_jax.compression.coding.storage import REMOVED, stored_bytes
from moe_jax.compression.methods import ream
from moe_jax.compression.methods.ream import output_similarity
from moe_jax.compression.source_layer import SourceLayer, design_matrices
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from moe_jax.nn.moe import RouterStatistics
from tests.compression.methods.recorded_layers import TOKENS, calibration_of, recorded
from tests.compression.methods.test_baselines import D, F, experts_of, output
from tests.compression.methods.test_expert_pruning import saliency_as_published, source_of
from tests.support.moe_models import memory_moe, run
from tests.support.tiers import long

E = 6
SHAPES = {"gated": {"d_model": D, "dim": F}, "plain": {"d_model": D, "dim": F, "gated": False, "bias": True}}


def known_of(source, **given):
    """A recording whose router's logits have similarities of their own."""
    known = recorded(source, **given)
    drawn = np.random.default_rng(3).standard_normal((E, 4))
    similarity = drawn @ drawn.T / np.outer(*[np.linalg.norm(drawn, axis=1)] * 2)
    assert known.statistics is not None
    usage = known.statistics.usage
    return known._replace(statistics=RouterStatistics(usage, usage, similarity))


def similarity_by_formula(layer: SourceLayer, kept: list[int], most: int) -> np.ndarray:
    """Cosines of weighted outputs over the tokens of the expert that is to be merged, float64."""
    assert layer.rows is not None
    x, experts = layer.rows.inputs.astype(np.float64), experts_of(layer)
    found = np.zeros((E, len(kept)))
    for e in set(range(E)) - set(kept):
        tokens = [t for t in range(len(x)) if e in layer.rows.experts[t]]
        if not tokens:
            continue
        tokens = [tokens[i] for i in np.round(np.linspace(0, len(tokens) - 1, min(most, len(tokens)))).astype(int)]
        weights = np.where(layer.rows.experts == e, layer.rows.weights, 0).sum(axis=1)[tokens][:, None].astype(float)
        own = weights * output(experts[e], x[tokens])
        for g, j in enumerate(kept):
            other = weights * output(experts[j], x[tokens])
            found[e, g] = np.sum(own * other) / np.linalg.norm(own) / np.linalg.norm(other)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [TOKENS, 50])
def test_outputs_are_compared_on_the_tokens_of_the_expert_that_goes(shape, most, monkeypatch):
    monkeypatch.setattr(ream, "MOST_TOKENS", most)
    source = source_of(shape)
    layer = SourceLayer(source, 0, calibration=known_of(source, unused=1))
    expected = similarity_by_formula(layer, [0, 2], most)
    assert np.ptp(expected[[1, 3, 4]]) > 0.01 and not expected[5].any()
    np.testing.assert_allclose(output_similarity(layer, np.array([0, 2])), expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_group_becomes_the_mean_of_aligned_experts_by_saliency(shape, tmp_path):
    source = source_of(shape)
    known = known_of(source, unused=1)
    layer = SourceLayer(source, 0, calibration=known)
    saliency = saliency_as_published(layer)
    kept = sorted(np.argsort(-saliency)[:3].tolist())
    assert known.statistics is not None
    alike = (known.statistics.similarity[:, kept] + similarity_by_formula(layer, kept, ream.MOST_TOKENS)) / 2
    groups = [kept.index(e) if e in kept else int(np.argmax(alike[e])) for e in range(E)]
    report = compress(
        source, tmp_path / "out", make_method("ream", {"keep": 0.5}),
        calibration=calibration_of(known, tmp_path), described={},
    ).layers[0]  # fmt: skip
    out = ModelDirectory(tmp_path / "out")
    assert report.choice == " | ".join(" ".join(str(e) for e in range(E) if groups[e] == g) for g in range(3))
    assert out.config.moe(0) == dataclasses.replace(source.config.moe(0), num_experts=3)
    router = source.leaves["layers/0/mlp/router/kernel"]
    np.testing.assert_array_equal(out.read("layers/0/mlp/router/kernel"), router[:, kept])
    before, designs = experts_of(layer), design_matrices(layer)
    for g, merged in enumerate(experts_of(SourceLayer(out, 0))):
        members = [e for e in range(E) if groups[e] == g]
        total = sum(saliency[e] for e in members)
        for name, array in merged.items():
            expected = np.zeros_like(array)
            for e in members:
                order = align(designs[e], designs[kept[g]]) if e != kept[g] else np.arange(F)
                own = before[e][name]
                aligned = own if name == "down/bias" else own[order] if name == "down" else own[..., order]
                expected += saliency[e] / total * aligned
            np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
    (counted,) = stored_bytes(source.config, [0], [REMOVED], {"keep": 0.5}, dtype="float32")
    assert counted.model_bytes == sum(out.read(path).nbytes for path in out.specs())


def test_what_cannot_be_merged_so():
    method = make_method("ream", {"keep": 0.5})
    with pytest.raises(InputError, match="give one with --calibrate TEXT"):
        method.check([SourceLayer(source_of(), 0)])
    with pytest.raises(InputError, match="experts are merged"):
        method.check([SourceLayer(source_of(merged_experts=3), 0)])
    beside = memory_moe(BankConfig(), shape=SHAPES["gated"], universal="med")
    with pytest.raises(InputError, match="--extended does not go"):
        method.check([SourceLayer(beside, 0, with_universal=True)])


def test_all_experts_may_stay(tmp_path):
    source = source_of()
    calibration = calibration_of(known_of(source), tmp_path)
    compress(source, tmp_path / "out", make_method("ream", {"keep": 1.0}), calibration=calibration, described={})
    out = ModelDirectory(tmp_path / "out")
    for path in out.specs():
        np.testing.assert_array_equal(out.read(path), source.leaves[path])


@long
def test_on_the_command_line(models, tmp_path, out_of, text, failing):
    options = ("--method", "ream", "--keep", 0.67)
    assert "give one with --calibrate TEXT" in failing(models["one"], tmp_path / "out", *options)
    calibrated = ("--calibrate", text, "--seq-len", 16, "--samples", 4, "--calibration-dir", tmp_path / "recorded")
    assert run(models["one"], tmp_path / "out", *options, *calibrated) == 0
    assert "nll" in out_of("eval", tmp_path / "out", "--text", text, "--seq-len", 48)
