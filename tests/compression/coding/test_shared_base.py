"""Centres in codes: what 4 + 2 bits come to, refitting, and what is written of them."""

import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.budget import trials
from moe_jax.compression.coding.coder import LeastError, shared_base_coder
from moe_jax.compression.coding.storage import layer_bytes
from moe_jax.compression.coding.write_experts import SharedBase, code_residuals
from moe_jax.compression.report import Measure
from moe_jax.compression.source_layer import SourceLayer, mean_kernel, unaligned
from moe_jax.experts import BaseCodes, forms
from moe_jax.experts.forms import LowRank, Matrix, Quantized, Sparse
from moe_jax.experts.forms.coding import Wanted
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from tests.compression.methods.recorded_layers import calibration_of, recorded
from tests.support.moe_models import MemorySource, memory_moe
from tests.support.tiers import long, one_in

EXPERTS, SIZE, CODER = 8, 256, LeastError()


def experts(rho, seed=0):
    """Of unit variance, of which the share `rho` is around their mean: what the residuals are to hold."""
    random = np.random.default_rng(seed)
    own = rho * EXPERTS / (EXPERTS - 1)  # of which their mean has one part in E
    common = np.sqrt(1 - own) * random.standard_normal((SIZE, SIZE))
    return [(common + np.sqrt(own) * random.standard_normal((SIZE, SIZE))).astype(np.float32) for _ in range(EXPERTS)]


def coded(kernels, centre, bits, refits):
    """Squared error and bits of a weight, of experts coded around a centre; None: without one."""
    form, matrix = forms.Quantized(bits=bits, group_size=128), Matrix("up", (SIZE, SIZE))
    found = code_residuals(
        lambda: kernels,
        None if centre is None else mean_kernel(kernels),
        lambda mean: SharedBase(*BaseCodes(code=centre).form.stored(mean, matrix, CODER)),
        lambda: [CODER] * EXPERTS,
        lambda expert, residual, coder: form.encode(residual, matrix, coder),
        lambda: Measure(EXPERTS, SIZE),
        num_experts=EXPERTS,
        dtype=np.dtype(np.float32),
        refits=refits,
    )
    stored = [*found.leaves.values(), *(() if centre is None else found.base.leaves.values())]
    weights = EXPERTS * SIZE * SIZE
    return found.measure.squared_error / weights, 8 * sum(leaf.nbytes for leaf in stored) / weights


@one_in(4, first=2)
@pytest.mark.parametrize(
    ("rho", "centre", "bits", "error", "once", "twice", "per_weight"),
    [
        (0.074, None, 4, 0.0096, None, None, 4.125),
        (0.72, None, 3, 0.0342, None, None, 3.125),
        (0.72, None, 2, 0.1153, None, None, 2.125),
        # (residual + error of the centre) times the error of so many bits: 0.074 + 0.0096 times 0.115.
        (0.074, "4", 2, 0.0096, 0.0096, 0.0096, 2.641),
        (0.72, "4", 2, 0.0832, 0.0723, 0.0680, 2.641),
        (0.074, "3", 1, 0.0388, 0.0387, 0.0387, 1.516),
        (0.72, "3", 1, 0.2633, 0.2421, 0.2377, 1.516),
        (0.074, "nf4", 2, 0.0095, 0.0095, 0.0095, 2.641),
    ],
)
def test_error_and_bits_of_gaussian_experts(rho, centre, bits, error, once, twice, per_weight):
    """For what two numbers of bits come to, and by how much refitting lowers the error, or hardly."""
    kernels = experts(rho)
    for refits, expected in enumerate((error,) if centre is None else (error, once, twice)):
        found, stored = coded(kernels, centre, bits, refits)
        assert found == pytest.approx(expected, rel=0.02)
        assert stored == pytest.approx(per_weight, abs=0.003)


@long
def test_a_refit_never_makes_it_worse():
    """Of all rounds the best one stays: with a centre as coarse as this, and residuals as fine, not always the last."""
    kernels = experts(0.3)
    for bits in (8, 4, 2):
        errors = [coded(kernels, "2", bits, refits)[0] for refits in (0, 1, 2)]
        assert errors == sorted(errors, reverse=True)


OPTIONS = {
    "resmoe, quantized": ("resmoe", {"residual": "quantized:2", "centre_bits": "4", "centre_group_size": 8}),
    "resmoe, up": ("resmoe", {"keep": 0.25, "centre_bits": "3"}),
    "resmoe, svd": ("resmoe", {"keep": 0.3, "residual": "svd", "centre_bits": "nf4"}),
    "ders-quantize": ("ders-quantize", {"bits": 2, "group_size": 8, "centre_bits": "4", "centre_group_size": 8}),
    "ders-sparsify": ("ders-sparsify", {"drop": 0.5, "keep": "magnitude", "centre_bits": "8"}),
}


@one_in(3, first=1)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_written_is_what_the_figures_say(name, tmp_path):
    """Errors and bytes of a model on the disk are those of the report, and of its config."""
    method, options = OPTIONS[name]
    source = memory_moe(BankConfig(), noise=0.2)
    made = make_method(method, options | ({"solver": "identity"} if method == "resmoe" else {}))
    report = compress(source, tmp_path / "out", made, described={})
    out = ModelDirectory(tmp_path / "out")
    layer, moe = report.layers[0], out.config.moe(0)
    code = options["centre_bits"]
    assert layer.choice.startswith("NF4 centre, " if code == "nf4" else f"{code}-bit centre, ")
    wrong = weight = 0.0
    for matrix in SourceLayer(source, 0).shapes:
        pairs = (SourceLayer(model, 0).kernels(matrix) for model in (source, out))
        for before, after in zip(*pairs, strict=True):
            wrong += float(np.sum((after - before) ** 2))
            weight += float(np.sum(before**2))
    assert layer.relative_error == pytest.approx(np.sqrt(wrong / weight), rel=1e-4)
    sizes = layer_bytes(moe, out.config.d_model, np.dtype("float32"))
    below = {path: leaf for path, leaf in out.specs().items() if "/experts/" in path}
    centre = sum(leaf.size * leaf.dtype.itemsize for path, leaf in below.items() if "/base/" in path)
    assert sizes.centre == centre > 0
    assert sizes.total == sum(leaf.size * leaf.dtype.itemsize for leaf in below.values())


@one_in(2)
@pytest.mark.parametrize("code", ["4", "nf4"])
@pytest.mark.parametrize("refit", [False, True])
def test_trials_foretell_the_error_around_a_centre_in_codes(code, refit, tmp_path):
    source, codes = memory_moe(BankConfig(), noise=0.2), BaseCodes(code=code)
    layer = SourceLayer(source, 0)
    tried = [
        Wanted(form=Sparse, keep=0.25, design="separate"),
        Wanted(form=LowRank, keep=0.2, design="separate"),
        Wanted(form=Quantized, bits=3),
    ]
    options = [
        {"keep": 0.25, "design": "separate", "refit": refit},
        {"keep": 0.2, "residual": "svd", "design": "separate"},
        {"residual": "quantized:3", "refit": refit},
    ]
    found = trials(layer, unaligned(layer), tried, refit=refit, codes=codes)
    for trial, chosen in zip(found, options, strict=True):
        made = make_method("resmoe", {**chosen, "solver": "identity", "centre_bits": code})
        report = compress(source, tmp_path / trial.wanted.form.kind, made, described={})
        error = report.layers[0].relative_error ** 2
        if refit and trial.wanted.form is Quantized:
            assert error <= trial.error * 1.001
        else:
            assert error == pytest.approx(trial.error, rel=1e-3)


@one_in(2)
@pytest.mark.parametrize("residual", ["concat", "separate", "up"])
def test_a_centre_for_what_has_no_code_of_every_entry_is_coded_for_the_least_change(residual, models, tmp_path):
    """Factors and some entries do not make up for its errors as codes do. Without feedback it is rounded."""
    stored, errors = ModelDirectory(models["moe"]), {}
    leaves = {path: stored.read(path) for path in stored.specs()}
    alike = {path: 0.95 * leaf[:1] + 0.05 * leaf for path, leaf in leaves.items() if "/mlp/experts/" in path}
    source = MemorySource(stored.config, leaves | alike)
    calibration = calibration_of(recorded(source, tokens=100), tmp_path)
    kind = {"residual": "up"} if residual == "up" else {"residual": "svd", "design": residual}
    options = {**kind, "keep": 0.1, "centre_bits": "2", "centre_group_size": 8}
    for feedback in (True, False):
        method = make_method("resmoe", {**options, "solver": "identity", "feedback": feedback})
        place = tmp_path / str(feedback)
        report = compress(source, place, method, calibration=calibration, described={}, layers=[0])
        errors[feedback] = report.layers[0].output_error
    assert errors[True] < 0.9 * errors[False]


def test_sparse_deltas_have_such_a_base_too(models, tmp_path):
    source, found = ModelDirectory(models["one"]), {}
    calibration = calibration_of(recorded(source, tokens=100), tmp_path)
    method = make_method("ders-sparsify", {"drop": 0.9, "keep": "magnitude", "centre_bits": "2"})
    for name, given in (("calibrated", calibration), ("not", None)):
        compress(source, tmp_path / name, method, calibration=given, described={}, layers=[0])
        found[name] = ModelDirectory(tmp_path / name).read("layers/0/mlp/experts/base/up/coded/codes")
    layer = SourceLayer(source, 0, calibration=calibration.layers[0])
    mean = mean_kernel(layer.kernels("up"))
    codes, _ = BaseCodes(code="2").form.stored(mean, layer.matrices["up"], shared_base_coder(layer, "up"))
    np.testing.assert_array_equal(found["calibrated"], codes["coded/codes"])
    assert not np.array_equal(found["calibrated"], found["not"])
