"""ResMoE on whole models: what is written against what it came from, orders of neurons, budgets."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.budget import Budget, trials
from moe_jax.compression.coding.pruning import mean_shares
from moe_jax.compression.source_layer import SourceLayer, aligned_kernels, design_matrices, mean_kernel, unaligned
from moe_jax.core.errors import InputError
from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.coding import Wanted
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from moe_jax.peft import trainable_paths
from tests.compression.methods.recorded_layers import calibration_of, recorded
from tests.support.moe_models import EXPERTS, MemorySource, memory_moe
from tests.support.numerics import logits_of
from tests.support.tiers import long, one_in

FULL = BankConfig()
FORMS = {
    "up": {"keep": 0.25},
    "up, separate, no refit": {"keep": 0.25, "design": "separate", "refit": False},
    "up, 4-bit values": {"keep": 0.3, "bits": 4},
    "svd": {"keep": 0.3, "residual": "svd"},
    "svd, separate": {"keep": 0.3, "residual": "svd", "design": "separate"},
    "quantized": {"residual": "quantized:3"},
    "average": {"keep": 0.25, "solver": "identity"},
}
SHAPES = {
    "gated": {"shape": {}},
    "plain with biases, bfloat16": {"shape": {"gated": False, "bias": True}, "dtype": "bfloat16"},
}


def permuted(source: MemorySource, seed: int) -> MemorySource:
    """The same model with the neurons of every expert in another order."""
    random, leaves = np.random.default_rng(seed), dict(source.leaves)
    for i in source.config.moe_layers:
        experts = f"layers/{i}/mlp/experts"
        for e in range(EXPERTS):
            order = random.permutation(source.config.layers[i].mlp.expert.dim)
            for path in (path for path in source.leaves if path.startswith(experts)):
                if path.endswith("down/bias"):
                    continue
                leaf = np.array(leaves[path])
                leaf[e] = leaf[e][order] if path.endswith(("down/kernel", "bias")) else leaf[e][:, order]
                leaves[path] = leaf
    return MemorySource(source.config, leaves)


def logits(source) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, source.config.vocab_size, (2, 12)).astype(np.int32)
    return np.asarray(logits_of(load_model(source), jnp.asarray(tokens)))


def designs(source, index) -> np.ndarray:
    """Float32[E, f, D], biases included."""
    return np.stack([np.asarray(d, np.float32) for d in design_matrices(SourceLayer(source, index))])


@one_in(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_figures_are_those_of_what_was_written(form, shape, tmp_path):
    source = permuted(memory_moe(FULL, noise=0.2, **SHAPES[shape]), 3)
    report = compress(source, tmp_path / "out", make_method("resmoe", FORMS[form]), described={})
    out, layer = ModelDirectory(tmp_path / "out"), report.layers[0]
    analysed = make_method("resmoe", FORMS[form]).analyse(SourceLayer(source, 0))
    orders = analysed["permutations"]
    before = np.take_along_axis(designs(source, 0), orders[:, :, None], axis=1)
    after = designs(out, 0)
    f, bias = before.shape[1], source.config.layers[0].mlp.expert.bias
    if bias:  # biases are stored as they were, in the order of the neurons
        column = source.config.d_model
        np.testing.assert_array_equal(after[:, :, column], before[:, :, column])
        before, after = (np.delete(designs_, column, axis=2) for designs_ in (before, after))
    error = np.sum((after - before) ** 2)
    # The model was written in its dtype, and what was read back is a sum of two such numbers.
    tolerance = 0.02 if "dtype" in SHAPES[shape] else 1e-3
    assert layer.error_per_neuron == pytest.approx(error / EXPERTS / f, rel=tolerance)
    assert layer.relative_error == pytest.approx(np.sqrt(error / np.sum(before**2)), rel=tolerance)
    assert layer.base == "barycenter of the experts" and layer.converged
    assert layer.bytes_after == sum(
        out.stored_bytes(path) for path in out.specs() if path.startswith("layers/0/mlp/experts")
    )


def test_everything_kept_gives_the_same_logits(tmp_path):
    source = permuted(memory_moe(FULL, noise=0.2, shape={"gated": False, "bias": True}), 1)
    compress(source, tmp_path / "out", make_method("resmoe", {"keep": 1.0}), described={})
    np.testing.assert_allclose(logits(ModelDirectory(tmp_path / "out")), logits(source), atol=2e-5)


def test_orders_of_neurons_and_of_experts_change_nothing(tmp_path):
    source = memory_moe(FULL, noise=0.3)
    reversed_ = {p: leaf[::-1] if "/experts/" in p else leaf for p, leaf in source.leaves.items()}
    reversed_["layers/0/mlp/router/kernel"] = source.leaves["layers/0/mlp/router/kernel"][:, ::-1]
    models = {"as it is": source, "neurons": permuted(source, 5), "experts": MemorySource(source.config, reversed_)}
    method, results = make_method("resmoe", {"keep": 0.25}), {}
    for name, model in models.items():
        report = compress(model, tmp_path / name, method, described={})
        results[name] = (
            report.layers[0].objective,
            report.layers[0].error_per_neuron,
            logits(ModelDirectory(tmp_path / name)),
        )
    for other in ("neurons", "experts"):
        assert results[other][:2] == pytest.approx(results["as it is"][:2], rel=1e-5)
        np.testing.assert_allclose(results[other][2], results["as it is"][2], atol=1e-4)


def test_planted_orders_are_found_and_better_than_the_average(tmp_path):
    source = memory_moe(FULL, noise=0.05)
    shuffled = permuted(source, 2)
    errors = {}
    for name, model, options in (
        ("aligned", source, {"solver": "identity"}),
        ("shuffled", shuffled, {}),
        ("average of shuffled", shuffled, {"solver": "identity"}),
    ):
        report = compress(model, tmp_path / name, make_method("resmoe", {"keep": 0.25, **options}), described={})
        errors[name] = report.layers[0].error_per_neuron
    assert errors["shuffled"] == pytest.approx(errors["aligned"], rel=1e-4)
    assert errors["average of shuffled"] > 10 * errors["aligned"]


def test_concat_keeps_the_share_and_equal_layers_stay_equal(tmp_path):
    source = memory_moe(FULL, FULL, noise=0.2)
    compress(source, tmp_path / "out", make_method("resmoe", {"keep": 0.2}), described={})
    first, second = (layer.mlp.bank for layer in ModelDirectory(tmp_path / "out").config.layers)
    assert first == second and len(set(first.form.entries)) > 1
    size = sum(np.prod(shape) for shape in SourceLayer(source, 0).shapes.values())
    assert sum(first.form.entries) == round(0.2 * size)


@long
def test_trials_tell_the_errors_beforehand(tmp_path):
    source = memory_moe(FULL, noise=0.2)
    layer = SourceLayer(source, 0)
    orders = make_method("resmoe", {"keep": 0.25}).analyse(layer)["permutations"]
    options = [{"keep": 0.25, "bits": 4}, {"keep": 0.3, "residual": "svd"}, {"residual": "quantized", "bits": 3}]
    tried = trials(layer, orders, [make_method("resmoe", given).choice for given in options], refit=True)
    for given, trial in zip(options, tried, strict=True):
        report = compress(source, tmp_path / str(given), make_method("resmoe", given), described={})
        # Only the groups of scales of kept values lie otherwise: by matrix, and not by all that is kept.
        assert trial.error == pytest.approx(report.layers[0].relative_error ** 2, rel=0.03)


def test_what_stays_of_matrices_is_the_mean_of_what_stays_of_experts():
    layer = SourceLayer(memory_moe(FULL, noise=0.2), 0)
    kernels = {name: np.stack(list(aligned_kernels(layer, name, unaligned(layer)))) for name in layer.shapes}
    centres = {name: mean_kernel(iter(kernel)) for name, kernel in kernels.items()}
    experts = [{name: kernel[e].copy() for name, kernel in kernels.items()} for e in range(EXPERTS)]
    each = np.stack([mean_shares(iter([expert]), centres, 0.25) for expert in experts])
    [trial] = trials(layer, unaligned(layer), [make_method("resmoe", {"keep": 0.25}).choice], refit=True)
    np.testing.assert_allclose(trial.shares, each.mean(axis=0), rtol=1e-6)
    assert np.abs(each - trial.shares).max() > 1e-3


def test_entries_of_a_layer_follow_its_own_shares():
    source = memory_moe(FULL, FULL, noise=0.2)
    layers, shares = [SourceLayer(source, i) for i in (0, 1)], [[0.6, 0.3, 0.1], [0.1, 0.3, 0.6]]
    budget = Budget(target_bytes=10**9, sizes=(make_method("resmoe", {"keep": 0.2}).choice,))
    analyses = {i: {"errors": np.ones(1), "shares": np.array([shares[i]])} for i in (0, 1)}
    divided = budget.divide(layers, analyses)
    first, second = (divided[i].bank.form.entries for i in (0, 1))
    assert first[0] > first[1] > first[2] and second[0] < second[1] < second[2]


def test_codes_make_up_for_errors_only_where_that_is_asked_for(tmp_path):
    source = memory_moe(FULL, noise=0.2)
    codes = {}
    for feedback in (True, False):
        method = make_method("resmoe", {"residual": "quantized", "bits": 3, "solver": "identity", "feedback": feedback})
        place = tmp_path / str(feedback)
        compress(source, place, method, calibration=calibration_of(recorded(source), tmp_path), described={})
        made = ModelDirectory(place)
        codes[feedback] = made.read(next(path for path in sorted(made.specs()) if path.endswith("codes")))
    assert (codes[True] != codes[False]).any()


def test_a_budget_is_kept_and_more_of_it_is_better(tmp_path):
    source = memory_moe(FULL, FULL, noise=0.2, shape={"d_model": 64, "dim": 96})
    # The second layer's experts are nearly alike: what they need little of is left to the first.
    for path in [p for p in source.leaves if p.startswith("layers/1/mlp/experts")]:
        leaf = source.leaves[path]
        source.leaves[path] = leaf.mean(axis=0) + 0.01 * (leaf - leaf.mean(axis=0))
    errors = []
    for target in (200_000, 260_000):
        method = make_method("resmoe", {"target_bytes": target, "residual": "svd"})
        report = compress(source, tmp_path / str(target), method, described={})
        assert report.expert_bytes_after <= target
        first, second = report.layers
        assert first.bytes_after > second.bytes_after and "rank" in first.choice
        errors.append(sum(layer.relative_error**2 for layer in report.layers))
    assert errors[1] < errors[0]
    centres = sum(np.prod(shape) * 4 for shape in SourceLayer(source, 0).shapes.values()) * 2
    with pytest.raises(InputError, match=f"below the {centres:,} bytes"):
        compress(source, tmp_path / "no", make_method("resmoe", {"target_bytes": int(centres) - 1}), described={})
    assert not list(tmp_path.glob("*no*")) and not list(tmp_path.glob(".no*"))


def test_weights_that_are_not_finite(tmp_path):
    source = memory_moe(FULL)
    source.leaves["layers/0/mlp/experts/up/kernel"][1, 2, 3] = np.nan
    for options in ({"keep": 0.5}, {"keep": 0.5, "solver": "identity"}):
        with pytest.raises(InputError, match="1 in layer 0: 1"):
            compress(source, tmp_path / "out", make_method("resmoe", options), described={})
    assert not list(tmp_path.iterdir())


def test_the_options_are_read_as_one_choice():
    sizes = LowRank.sizes_to_try("separate")
    for options, choice in (
        ({"keep": 0.25}, Wanted(form=Sparse, keep=0.25)),
        ({"keep": 0.25, "residual": "up", "bits": 4}, Wanted(form=Sparse, keep=0.25, bits=4)),
        ({"keep": 0.25, "design": "separate"}, Wanted(form=Sparse, keep=0.25, design="separate")),
        ({"keep": 0.25, "residual": "svd"}, Wanted(form=LowRank, keep=0.25)),
        ({"residual": "quantized"}, Wanted(form=Quantized, bits=4)),
        ({"residual": "quantized", "bits": 2}, Wanted(form=Quantized, bits=2)),
        ({"residual": "quantized:2"}, Wanted(form=Quantized, bits=2)),
        ({"residual": "quantized:2", "scale_bits": 8}, Wanted(form=Quantized, bits=2, scale_bits=8)),
        ({"residual": "quantized:2", "levels": "fitted"}, Wanted(form=Quantized, bits=2, table=True)),
        ({"residual": "quantized:2", "zero_points": True}, Wanted(form=Quantized, bits=2, zero_points=True)),
        ({"residual": "quantized:1", "row_scales": True}, Wanted(form=Quantized, bits=1, row_scales=True)),
        ({"target_bytes": 9, "residual": "svd", "design": "separate"}, Budget(target_bytes=9, sizes=sizes)),
        ({"budget_bits": 3.5, "residual": "svd", "design": "separate"}, Budget(budget_bits=3.5, sizes=sizes)),
    ):
        assert make_method("resmoe", options).choice == choice
    every = make_method("resmoe", {"budget_bits": 3.5}).choice.sizes
    assert {size.form for size in every} == {Sparse, LowRank, Quantized} and len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "resmoe needs --keep, --target-bytes or --budget-bits"),
        ({"keep": 0.0}, "keep=0 must lie in"),
        ({"keep": 1.5}, "keep=1.5 must lie in"),
        ({"keep": 0.5, "residual": "quantized"}, "quantized residual"),
        ({"keep": 0.5, "levels": "fitted"}, "levels=fitted go with --residual quantized"),
        ({"budget_bits": 3, "levels": "fitted"}, "levels=fitted go with --residual quantized"),
        ({"keep": 0.5, "scale_bits": 8}, "scale_bits=8 goes with --residual quantized"),
        ({"keep": 0.5, "zero_points": True}, "zero_points go with --residual quantized"),
        ({"budget_bits": 3, "row_scales": True}, "row_scales go with --residual quantized"),
        ({"residual": "quantized", "zero_points": True, "levels": "even"}, "zero points"),
        ({"residual": "quantized:6"}, "bits=6 must .* of 8, 4, 3, 2, 1"),
        ({"residual": "up:4", "keep": 0.5}, "svd, quantized or quantized:BITS"),
        ({"residual": "svd", "keep": 0.5, "bits": 4}, "svd residual"),
        ({"keep": 0.5, "target_bytes": 100}, "target_bytes chooses keep"),
        ({"target_bytes": 100, "budget_bits": 3.0}, "same in two"),
        ({"budget_bits": -1.0}, "budget_bits=-1 must be above 0"),
        ({"budget_bits": float("nan")}, "budget_bits=nan must be above 0"),
        ({"budget_bits": float("inf")}, "budget_bits=inf must be"),
        ({"target_bytes": 10**400}, "must be above 0"),
        ({"target_bytes": 100, "residual": "quantized:4"}, "target_bytes chooses keep"),
        ({"keep": 0.5, "solver": "annealing"}, "solver"),
        ({"residual": "quantized:2", "design": "separate"}, "design=separate"),
        ({"residual": "quantized:2", "design": "separate", "centre_bits": "4"}, "design=separate"),
        ({"target_bytes": 100, "residual": "quantized", "design": "separate"}, "design=separate"),
        ({"residual": "quantized:2", "refit": False}, "--no-refit"),
        ({"residual": "svd", "keep": 0.5, "refit": False, "centre_bits": "4"}, "--no-refit"),
        ({"residual": "svd", "keep": 0.5, "feedback": False}, "--no-feedback"),
        ({"residual": "up", "keep": 0.5, "bits": 4, "feedback": False}, "--no-feedback"),
    ],
)
def test_options(options, message):
    with pytest.raises(InputError, match=message):
        make_method("resmoe", options)


@pytest.mark.parametrize(
    "options",
    [
        {"residual": "quantized:2", "refit": False, "feedback": False, "centre_bits": "4"},
        {"residual": "up", "keep": 0.5, "refit": False, "design": "separate"},
        {"residual": "svd", "keep": 0.5, "feedback": False, "centre_bits": "4"},
        {"residual": "quantized:2", "feedback": False},
        {"keep": 0.5, "feedback": False},
        {"budget_bits": 3, "refit": False, "feedback": False, "design": "separate"},
    ],
)
def test_options_that_may_change_something_are_taken(options):
    assert make_method("resmoe", options)


def test_the_centre_is_trained_or_not(tmp_path):
    for frozen_by_bank in (False, True):
        source = memory_moe(dataclasses.replace(FULL, train_base=not frozen_by_bank), noise=0.2)
        out = tmp_path / str(frozen_by_bank)
        compress(source, out, make_method("resmoe", {"keep": 0.25}), described={})
        model = load_model(ModelDirectory(out))
        for frozen_by_recipe in (False, True):
            freeze = (r".*/experts/base/.*",) if frozen_by_recipe else ()
            trained = trainable_paths(model, freeze=freeze)
            assert any(path.endswith("delta/up/values") for path in trained)
            assert any("/base/" in path for path in trained) == (not frozen_by_bank and not frozen_by_recipe)
