"""Bits for every matrix, by what the model's predictions lose: what is measured, and what is made of it."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.api.compress import calibrate
from moe_jax.compression import compress, make_method
from moe_jax.compression.budget import Candidate, allocate, ways
from moe_jax.compression.calibration.recording import Calibration, sample_windows
from moe_jax.compression.calibration.sensitivities import TRIED_BITS, TRIED_GROUP_SIZE, measure_sensitivities
from moe_jax.compression.coding import storage
from moe_jax.compression.coding.coder import expert_coders
from moe_jax.compression.coding.storage import layer_bytes
from moe_jax.compression.methods import bits_by_matrix
from moe_jax.compression.methods.bits_by_matrix import best_combinations
from moe_jax.compression.methods.choices import Alike, in_two_parts
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.stream import check_before_calibration
from moe_jax.conversion import read_hf_config
from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer, find_tokenizer
from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts.forms import ffn_matrices
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from tests.compression.methods.recorded_layers import recorded
from tests.support.dense_models import random_leaves
from tests.support.hf_checkpoints import CONFIGS
from tests.support.moe_models import MemorySource, check_merged
from tests.support.numerics import logits_of
from tests.support.tiers import long, one_in


@pytest.fixture(scope="module")
def source(models):
    return ModelDirectory(models["moe"])


@pytest.fixture(scope="module")
def calibrated(source, tmp_path_factory):
    """A calibration with sensitivities, the text of it, and the folder where it is kept."""
    folder = tmp_path_factory.mktemp("calibrated")
    text = folder / "text.txt"
    text.write_text("All the world is a stage, and all the men and women merely players. " * 10)
    place = (folder / "kept").joinpath
    return calibrate(source, text, seq_len=16, samples=8, place=place, sensitivities=True), text, place


def windows_of(source, text) -> np.ndarray:
    tokenizer = Tokenizer(find_tokenizer(source.tokenizer_files, source.path), source.config)
    return sample_windows(tokenizer.encode(text.read_text()), seq_len=16, samples=8)


def log_probabilities(source, windows) -> np.ndarray:
    logits = np.asarray(logits_of(load_model(source), jnp.asarray(windows)), np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


@long
def test_sensitivity_is_the_divergence_by_the_error_of_outputs(source, calibrated):
    """Against the whole model with one layer coded, and its divergence in float64."""
    calibration, text, _ = calibrated
    windows = windows_of(source, text)
    before = log_probabilities(source, windows)
    leaves = {path: source.read(path) for path in source.specs()}
    for index, found in calibration.layers.items():
        layer = SourceLayer(source, index, calibration=found)
        for name in layer.shapes:
            coded, made, sums = dict(leaves), [], np.zeros(2)
            for kernel, coder in zip(layer.kernels(name), expert_coders(layer, name), strict=True):
                made.append(coder.quantize(kernel, bits=TRIED_BITS, group_size=TRIED_GROUP_SIZE).approximation)
                change = (made[-1] - kernel).astype(np.float64)
                sums += np.trace(change.T @ coder.moment @ change), np.trace(kernel.T @ coder.moment @ kernel)
            coded[f"layers/{index}/mlp/experts/{name}/kernel"] = np.stack(made)
            after = log_probabilities(MemorySource(source.config, coded), windows)
            divergence = np.mean(np.sum(np.exp(before) * (before - after), axis=-1))
            assert found.sensitivities[name] == pytest.approx(divergence * sums[1] / sums[0], rel=1e-2)


@long
def test_sensitivities_are_the_same_over_a_mesh(source, calibrated):
    calibration, text, _ = calibrated
    measured = measure_sensitivities(
        source, windows_of(source, text), calibration.layers.__getitem__, mesh=make_mesh({"data": 8}), batch_size=3
    )
    for index, found in calibration.layers.items():
        assert measured[index] == pytest.approx(found.sensitivities, rel=1e-3)


def test_sensitivities_are_kept_and_found_again(source, calibrated, monkeypatch):
    calibration, text, place = calibrated
    monkeypatch.setattr("moe_jax.api.compress.measure_sensitivities", None)
    again = calibrate(source, text, seq_len=16, samples=8, place=place, sensitivities=True)
    assert {i: one.sensitivities for i, one in again.layers.items()} == {
        i: one.sensitivities for i, one in calibration.layers.items()
    }


# Half of it is what the disk needs to know of leaves, in so small a model.
@long
@pytest.mark.parametrize("target", [6_600, 8_000, 9_500])
def test_stays_within_the_budget_and_is_better_with_more(source, calibrated, target, tmp_path):
    calibration, *_ = calibrated
    reports = {}
    for budget in (target, target + 1_500):
        method = make_method("allocate", {"target_bytes": budget, "group_size": 8, "solver": "identity"})
        out = tmp_path / str(budget)
        reports[budget] = compress(source, out, method, calibration=calibration, described={})
        assert reports[budget].expert_bytes_after <= budget

    def predicted(report) -> float:
        return sum(layer.predicted_divergence for layer in report.layers)

    assert predicted(reports[target + 1_500]) < predicted(reports[target])
    assert all("quantized" in layer.choice for layer in reports[target].layers)


@long
def test_a_layer_on_which_all_depends_gets_the_bits(source, calibrated, tmp_path):
    calibration, *_ = calibrated
    method = make_method("allocate", {"target_bytes": 8_000, "group_size": 8, "solver": "identity"})
    choices = {}
    for important in (0, 2):
        layers = {
            i: one._replace(sensitivities=dict.fromkeys(one.sensitivities, 100.0 if i == important else 1e-3))
            for i, one in calibration.layers.items()
        }
        report = compress(
            source, tmp_path / str(important), method, calibration=calibration._replace(layers=layers), described={}
        )
        choices[important] = {layer.layer: layer.bytes_after for layer in report.layers}
    assert choices[0][0] > choices[2][0] and choices[2][2] > choices[0][2]


def test_one_choice_for_all_layers_is_taken_where_it_is_better():
    """The walk takes the steepest step of one layer, after which there is room left, but not enough for the other's."""
    candidates = {
        0: [Candidate(10, 8.0), Candidate(16, 5.0), Candidate(20, 2.5)],
        1: [Candidate(10, 8.0), Candidate(16, 5.0), Candidate(20, 4.5)],
    }

    def best_of(candidates, room):
        return min(
            ways(candidates, candidates, room), key=lambda chosen: sum(c.error for c in chosen.values())
        ).values()

    assert sum(found.error for found in allocate(candidates, 32).values()) == 10.5
    assert [found.nbytes for found in best_of(candidates, 32)] == [16, 16]
    assert [found.error for found in best_of(candidates, 40)] == [2.5, 4.5]


@given(st.lists(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=5), min_size=1,
                max_size=3))  # fmt: skip
def test_combinations_that_are_left_out_are_no_better_than_one_that_is_there(sizes):
    by_matrix = [[Candidate(*pair, choice=pair) for pair in own] for own in sizes]
    best = best_combinations(by_matrix)
    for some in itertools.product(*sizes):
        nbytes, error = np.sum(some, axis=0)
        assert any(c.nbytes <= nbytes and c.error <= error for c in best)
    for found in best:
        assert (found.nbytes, found.error) == tuple(np.sum(found.choice, axis=0))
    assert sorted(best, key=lambda c: -c.error) == best


@pytest.mark.parametrize(
    "more",
    [
        {"target_bytes": 8_000},
        pytest.param({"target_bytes": 11_000, "levels": "fitted", "scale_bits": 8}, marks=long),  # compiles much
    ],
    ids=["plain", "fitted levels and 8-bit scales"],
)
@long
def test_matrices_get_bits_of_their_own(source, calibrated, more, tmp_path):
    """Where little depends on all but `down`, that has more; and what is merged gives the same as what is in codes."""
    calibration, *_ = calibrated
    layers = {
        i: one._replace(sensitivities={"gate": 1e-5, "up": 1e-5, "down": 1.0}) for i, one in calibration.layers.items()
    }
    method = make_method("allocate", {"group_size": 8, "solver": "identity", **more})
    report = compress(source, tmp_path / "out", method, calibration=calibration._replace(layers=layers), described={})
    assert any("(down" in layer.choice for layer in report.layers)
    small = ModelDirectory(tmp_path / "out")
    for i in small.config.moe_layers:
        bank, matrices = small.config.moe(i).bank, ffn_matrices(small.config.moe(i).expert, small.config.d_model)
        assert bank.form.of_matrix(matrices["down"]).bits > bank.form.of_matrix(matrices["up"]).bits
    check_merged(small, source.config, {path: source.read(path) for path in source.specs()})


@long
def test_matrices_that_are_alike_share_a_centre_and_others_do_not(source, calibrated, tmp_path, monkeypatch):
    """In one layer; and what is merged gives the same as what is in codes."""
    for module in (storage, bits_by_matrix):  # in so small a model, leaves are dearer to the disk than bits
        monkeypatch.setattr(module, "LEAF_OVERHEAD", 0)
    calibration, *_ = calibrated
    leaves, random = {path: source.read(path) for path in source.specs()}, np.random.default_rng(0)
    for path, leaf in leaves.items():
        if path.endswith("/kernel") and "/mlp/experts/" in path:
            size = 1.0 if "/up/" not in path else 0.05
            own = (size * random.standard_normal(leaf.shape)).astype(leaf.dtype)
            leaves[path] = own if size == 1 else random.standard_normal(leaf.shape[1:]).astype(leaf.dtype) + own
    source = MemorySource(source.config, leaves)
    method = make_method("allocate", {"target_bytes": 8_500, "group_size": 8, "solver": "identity"})
    compress(source, tmp_path / "out", method, calibration=calibration, described={})
    small = ModelDirectory(tmp_path / "out")
    for i in small.config.moe_layers:
        moe = small.config.moe(i)
        assert [name for name in moe.expert.matrices if moe.bank.has_base_of(name)] == ["up"]
    check_merged(small, source.config, leaves)


@long
@one_in(2)
@pytest.mark.parametrize("target", [4_500, 6_000])
def test_experts_get_bits_of_their_own(source, calibrated, target, tmp_path, monkeypatch):
    """No worse by the same measure; within the budget; and what is merged gives the same as what is in codes."""
    # In so small a model, leaves are dearer to the disk than bits.
    for module in (storage, bits_by_matrix):
        monkeypatch.setattr(module, "LEAF_OVERHEAD", 0)
    calibration, *_ = calibrated
    leaves = {path: source.read(path) for path in source.specs()}
    for path, leaf in leaves.items():
        if "/mlp/experts/" in path:  # there is little to lose of all experts but the first
            leaves[path] = np.concatenate([leaf[:1], leaf[1:] / 16])
    source = MemorySource(source.config, leaves)
    reports = {}
    for experts in ("alike", "own"):
        options = {"target_bytes": target, "group_size": 8, "solver": "identity", "experts": experts}
        method = make_method("allocate", options)
        reports[experts] = compress(source, tmp_path / experts, method, calibration=calibration, described={})
    lost = {name: sum(layer.predicted_divergence for layer in report.layers) for name, report in reports.items()}
    assert lost["own"] < lost["alike"]
    assert any("mixed" in layer.choice for layer in reports["own"].layers)
    small = ModelDirectory(tmp_path / "own")
    sizes = [layer_bytes(small.config.moe(i), small.config.d_model, np.dtype("float32")).total for i in (0, 2)]
    assert sum(sizes) <= target
    check_merged(small, source.config, leaves)


@long
@pytest.mark.parametrize("experts", ["alike", "own"])
def test_less_than_a_bit_for_every_expert(experts, tmp_path):
    """Experts have factors around a centre in codes where there is no room for more."""
    config = read_hf_config({**CONFIGS["mixtral"], "hidden_size": 64, "intermediate_size": 128})
    source = MemorySource(config, random_leaves(config))
    (tmp_path / "text.txt").write_text("of what the rows are")
    alike = {"gate": 1.0, "up": 1.0, "down": 1.0}
    layers = {i: recorded(source, seed=i, tokens=100)._replace(sensitivities=alike) for i in config.moe_layers}
    calibration, found = Calibration((tmp_path / "text.txt",), layers), {}
    for target in (100_000, 60_000):
        options = {"target_bytes": target, "group_size": 64, "solver": "identity", "experts": experts}
        report = compress(
            source, tmp_path / str(target), make_method("allocate", options), calibration=calibration, described={}
        )
        assert report.expert_bytes_after <= target
        found[target] = sum(layer.predicted_divergence for layer in report.layers)
    assert all("low-rank, rank" in layer.choice for layer in report.layers)
    assert 0 < found[100_000] < found[60_000]
    check_merged(ModelDirectory(tmp_path / "60000"), config, {path: source.read(path) for path in source.specs()})


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 20), min_size=4, max_size=4)), min_size=2, max_size=4)
)
def test_two_parts_have_the_errors_and_bytes_that_they_say(sizes):
    """Also against all ways to divide the experts: none of as many has less."""
    some = [
        Alike(100 + 4 * own, own, 7, np.asarray(errors, float), (number,)) for number, (own, errors) in enumerate(sizes)
    ]
    for nbytes, error, (parts, part_of) in in_two_parts(some, multiple=1):
        few, many = (some[number] for (number,) in parts)
        size = sum(part_of)
        assert 0 < size < 4 and nbytes == 100 + (4 - size) * few.own + size * many.own + 7
        assert error == sum((few, many)[part].errors[expert] for expert, part in enumerate(part_of))
        for chosen in itertools.combinations(range(4), size):
            assert error <= sum((many if e in chosen else few).errors[e] for e in range(4))
    assert all(sum(c.choice.part_of) == 2 for c in in_two_parts(some, multiple=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs --budget-bits or --target-bytes"),
        ({"budget_bits": 3.0, "target_bytes": 10}, "and not both"),
        ({"budget_bits": 3.0, "group_size": 5}, "multiple of 8"),
        ({"budget_bits": -1.0}, "must be above 0"),
        ({"budget_bits": 3.0, "levels": "even"}, "levels"),
        ({"budget_bits": 3.0, "scale_bits": 4}, "scale_bits"),
        ({"budget_bits": 3.0, "levels": "fitted", "zero_points": True}, "levels=fitted do not go"),
        ({"budget_bits": 3.0, "experts": "mixed"}, "experts"),
        ({"budget_bits": 3.0, "experts_multiple": 0}, "experts_multiple"),
        ({"budget_bits": 3.0, "experts_multiple": 2}, "experts=own"),
    ],
)
def test_options_that_will_not_do(options, message):
    with pytest.raises(InputError, match=message):
        make_method("allocate", options)


def test_what_it_cannot_do_is_said_before_anything_is_written(source, calibrated, tmp_path):
    calibration, *_ = calibrated
    enough = make_method("allocate", {"target_bytes": 8_000, "group_size": 8})
    with pytest.raises(InputError, match="--calibrate TEXT"):
        compress(source, tmp_path / "out", enough, described={})
    little = make_method("allocate", {"budget_bits": 0.5})
    with pytest.raises(InputError, match="experts of 2 layers"):
        compress(source, tmp_path / "out", little, calibration=calibration, described={})
    unmeasured = calibration._replace(
        layers={i: one._replace(sensitivities=None) for i, one in calibration.layers.items()}
    )
    with pytest.raises(InputError, match="how much depends"):
        compress(source, tmp_path / "out", enough, calibration=unmeasured, described={})
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_measured_is_refused_before_the_text_is_run(source, tmp_path):
    codes = make_method("quantize", {"bits": 4, "group_size": 8})
    compress(source, tmp_path / "codes", codes, described={})
    allocated = make_method("allocate", {"target_bytes": 8_000, "group_size": 8})
    check_before_calibration(source, allocated, source.config.moe_layers, extended=False)
    packed = ModelDirectory(tmp_path / "codes")
    with pytest.raises(InputError, match="model with moe-jax export"):
        check_before_calibration(packed, allocated, packed.config.moe_layers, extended=False)
