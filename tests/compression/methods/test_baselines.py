"""Every baseline against plain NumPy on small layers, gated and plain, and what it leaves on the disk."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.methods.interface import Base
from moe_jax.compression.methods.narrower import StructuredPruning, cluster
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.spec import METHODS
from moe_jax.compression.stream import compress
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.coding import Residual
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from tests.compression.coding.test_quantizer import symmetric_errors
from tests.support.moe_models import EXPERTS, MemorySource, memory_moe

D, F = 16, 24
# Independent experts, as after training from scratch: nothing of what follows needs a common origin.
GATED = {"noise": 1.0, "shape": {"d_model": D, "dim": F}}
PLAIN = {"noise": 1.0, "shape": {"d_model": D, "dim": F, "gated": False, "bias": True}}
KEEPING = {
    name: {"bits": 4} if name == "quantize" else {"keep": 0.5}
    for name in ("up", "sp", "svd", "msmoe", "meo", "git-rebasin", "mlp-fusion", "quantize")
}

FULL, LOW_RANK = BankConfig(), BankConfig(kind="low-rank", rank=2)


def source_of(kind: dict, *banks: BankConfig, **moe) -> MemorySource:
    """A model of its own, though drawn once."""
    made = _drawn(kind is GATED, banks or (FULL,), tuple(moe.items()))
    return MemorySource(made.config, dict(made.leaves))


@functools.cache
def _drawn(gated: bool, banks: tuple[BankConfig, ...], moe: tuple) -> MemorySource:
    return memory_moe(*banks, **(GATED if gated else PLAIN), **dict(moe))


def compressed(source: MemorySource, method, index: int = 0, calibration=None):
    """A layer after compression, as a source, and its figures."""
    layer = SourceLayer(source, index, calibration=calibration)
    method.check([layer])
    analysis = method.analyse(layer)
    target = method.plan([layer], {index: analysis})[index]
    leaves = dict(source.leaves)
    for path in source.leaves:
        if path.startswith(f"layers/{index}/mlp/experts/"):
            del leaves[path]
    figures = method.compress(
        layer, Base(layer, None), target, lambda path, leaf: leaves.__setitem__(f"layers/{index}/mlp/{path}", leaf),
        analysis,
    )  # fmt: skip
    config = replaced(source.config, index, target)
    return SourceLayer(MemorySource(config, leaves), index), figures, analysis


def replaced(config, index, moe):
    layers = list(config.layers)
    layers[index] = dataclasses.replace(layers[index], mlp=moe)
    return dataclasses.replace(config, layers=tuple(layers))


def experts_of(layer: SourceLayer) -> list[dict[str, np.ndarray]]:
    """Float64 kernels and biases of every expert, `up`, `up/bias` and so on."""
    experts: list[dict[str, np.ndarray]] = [{} for _ in range(layer.moe.bank_experts)]
    for name in layer.shapes:
        for expert, kernel in zip(experts, layer.kernels(name), strict=True):
            expert[name] = np.asarray(kernel, np.float64)
        biases = layer.biases(name)
        if biases is not None:
            for expert, bias in zip(experts, biases, strict=True):
                expert[f"{name}/bias"] = np.asarray(bias, np.float64)
    return experts


def design_of(expert: dict[str, np.ndarray]) -> np.ndarray:
    columns = []
    for name in ("gate", "up"):
        if name in expert:
            columns.append(expert[name].T)
            if f"{name}/bias" in expert:
                columns.append(expert[f"{name}/bias"][:, None])
    return np.concatenate([*columns, expert["down"]], axis=1)


def squared_error(before: list[dict], after: list[dict]) -> float:
    """Sum over kernels only, as figures are."""
    return sum(
        float(((one[name] - other[name]) ** 2).sum())
        for one, other in zip(before, after, strict=True)
        for name in one
        if not name.endswith("bias")
    )


def norm_of(experts: list[dict]) -> float:
    return sum(float((array**2).sum()) for expert in experts for name, array in expert.items() if "bias" not in name)


def output(expert: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    silu = lambda z: z / (1 + np.exp(-z))  # noqa: E731
    up = x @ expert["up"] + expert.get("up/bias", 0)
    hidden = silu(x @ expert["gate"] + expert.get("gate/bias", 0)) * up if "gate" in expert else silu(up)
    return hidden @ expert["down"] + expert.get("down/bias", 0)


X = np.random.default_rng(7).standard_normal((5, D))


@pytest.mark.parametrize("kind", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("design", ["concat", "separate"])
def test_up_keeps_the_largest_weights(kind, design):
    source = source_of(kind)
    before = experts_of(SourceLayer(source, 0))
    layer, figures, _ = compressed(source, METHODS["up"](keep=0.3, design=design))
    bank = layer.moe.bank
    assert (bank.kind, bank.base) == ("sparse", "none")
    after = experts_of(layer)
    kept, names = 0, list(layer.shapes)
    counts = {name: bank.form.kept_entries(matrix) for name, matrix in layer.matrices.items()}
    for name, count in counts.items():
        kept += count
        for one, other in zip(before, after, strict=True):
            threshold = np.sort(np.abs(one[name]).reshape(-1))[-count]
            expected = np.where(np.abs(one[name]) >= threshold, one[name], 0)
            np.testing.assert_allclose(other[name], expected, rtol=1e-6)
    size = len(names) * D * F
    assert kept == pytest.approx(0.3 * size, abs=len(names))
    if design == "separate":
        assert len(set(counts.values())) == 1
    assert figures.relative_error == pytest.approx(np.sqrt(squared_error(before, after) / norm_of(before)), rel=1e-5)
    assert figures.error_per_neuron == pytest.approx(squared_error(before, after) / EXPERTS / F, rel=1e-5)
    assert figures.delta_error is None and figures.cosine_mean is None


def test_up_concat_has_one_threshold_where_one_matrix_is_large():
    source = source_of(GATED)
    path = "layers/0/mlp/experts/down/kernel"
    source.leaves[path] = source.leaves[path] * 10
    layer, _, _ = compressed(source, METHODS["up"](keep=0.3, design="concat"))
    gate, up, down = map(layer.moe.bank.form.kept_entries, layer.matrices.values())
    assert down > 3 * max(gate, up)


@pytest.mark.parametrize("kind", [GATED, PLAIN], ids=["gated", "plain"])
def test_sp_concat_keeps_the_neurons_of_largest_rows(kind):
    source = source_of(kind)
    before = experts_of(SourceLayer(source, 0))
    layer, figures, _ = compressed(source, METHODS["sp"](keep=0.4))
    count = round(0.4 * F)
    assert layer.moe.expert.dim == count and layer.moe.bank == BankConfig()
    pruned = []
    for one, other in zip(before, experts_of(layer), strict=True):
        rows = np.abs(design_of(one)).sum(axis=1)
        kept = np.sort(np.argsort(-rows)[:count])
        np.testing.assert_allclose(design_of(other), design_of(one)[kept], rtol=1e-6)
        zeroed = {name: array.copy() for name, array in one.items()}
        dropped = np.setdiff1d(np.arange(F), kept)
        for name in layer.shapes:
            zeroed[name][dropped if name == "down" else np.s_[:, dropped]] = 0
        pruned.append(zeroed)
        if "down/bias" in one:
            np.testing.assert_allclose(other["down/bias"], one["down/bias"])
    assert figures.error_per_neuron == pytest.approx(squared_error(before, pruned) / EXPERTS / F, rel=1e-5)


@pytest.mark.parametrize("kind", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("keep", [0.3, 0.8])
def test_sp_separate_gives_what_separately_pruned_matrices_give(kind, keep):
    """A neuron that one matrix drops, input bias and all, contributes nothing: so it need not be stored."""
    source = source_of(kind)
    before = experts_of(SourceLayer(source, 0))
    layer, figures, _ = compressed(source, METHODS["sp"](keep=keep, design="separate"))
    pruned, survivors = [], []
    for one in before:
        other, alive = {name: array.copy() for name, array in one.items()}, np.ones(F, bool)
        for name in layer.shapes:
            rows = np.abs(one[name] if name == "down" else one[name].T).sum(axis=1)
            if name != "down":
                rows = rows + np.abs(one.get(f"{name}/bias", 0))
            dropped = np.argsort(-rows, kind="stable")[round(keep * F) :]
            other[name][dropped if name == "down" else np.s_[:, dropped]] = 0
            if name != "down" and f"{name}/bias" in other:
                other[f"{name}/bias"][dropped] = 0
            alive[dropped] = False
        pruned.append(other)
        survivors.append(alive.sum())
    assert layer.moe.expert.dim == max(survivors) < round(keep * F)
    for one, other in zip(pruned, experts_of(layer), strict=True):
        np.testing.assert_allclose(output(other, X), output(one, X), rtol=1e-5, atol=1e-6)
    assert figures.error_per_neuron == pytest.approx(squared_error(before, pruned) / EXPERTS / F, rel=1e-5)


def test_sp_layers_of_one_shape_stay_equal():
    source = source_of(GATED, FULL, FULL)
    layers = [SourceLayer(source, i) for i in range(2)]
    method = StructuredPruning(keep=0.5, design="separate")
    analyses = {layer.index: method.analyse(layer) for layer in layers}
    planned = method.plan(layers, analyses)
    widest = max(int(found["kept"].all(axis=1).sum(axis=1).max()) for found in analyses.values())
    assert planned[0] == planned[1] and planned[0].expert.dim == widest


@pytest.mark.parametrize("kind", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("design", ["concat", "separate"])
def test_svd_is_the_best_of_its_rank(kind, design):
    source = source_of(kind)
    before = experts_of(SourceLayer(source, 0))
    layer, figures, _ = compressed(source, METHODS["svd"](keep=0.5, design=design))
    m = len(layer.shapes)
    if design == "concat":
        rank = int(0.5 * F * m * D / (F + m * D))
        assert (layer.moe.bank.kind, layer.moe.bank.form.rank) == ("joint-low-rank", rank)
        matrices = [np.concatenate([e[n] if n == "down" else e[n].T for n in layer.shapes], axis=1) for e in before]
    else:
        rank = int(0.5 * D * F / (D + F))
        assert (layer.moe.bank.kind, layer.moe.bank.form.rank) == ("low-rank", rank)
        matrices = [expert[name] for expert in before for name in layer.shapes]
    least = sum((np.linalg.svd(matrix, compute_uv=False)[rank:] ** 2).sum() for matrix in matrices)
    assert squared_error(before, experts_of(layer)) == pytest.approx(least, rel=1e-4)
    assert figures.error_per_neuron == pytest.approx(least / EXPERTS / F, rel=1e-4)


@settings(max_examples=15)
@given(n=st.integers(2, 30), dim=st.integers(1, 6), share=st.floats(0.05, 1), seed=st.integers(0, 100))
def test_clusters_are_a_fixed_point_of_lloyds_algorithm(n, dim, share, seed):
    points = np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
    count = max(1, round(share * n))
    labels = cluster(points, count, seed=0)
    assert np.array_equal(labels, cluster(points, count, seed=0))
    assert labels.shape == (n,) and set(labels) <= set(range(count))
    means = np.stack([points[labels == k].mean(axis=0) if (labels == k).any() else np.full(dim, 1e6) for k in
                      range(count)])  # fmt: skip
    distances = ((points[:, None] - means[None]) ** 2).sum(axis=2)
    own = distances[np.arange(n), labels]
    assert (own <= distances.min(axis=1) + 1e-4).all()


@pytest.mark.parametrize("kind", [GATED, PLAIN], ids=["gated", "plain"])
def test_mlp_fusion_puts_the_counts_into_the_output_side(kind):
    source = source_of(kind)
    before = experts_of(SourceLayer(source, 0))
    layer, figures, _ = compressed(source, METHODS["mlp-fusion"](keep=0.25))
    count = round(0.25 * F)
    assert layer.moe.expert.dim == count
    approximations = []
    for one, other in zip(before, experts_of(layer), strict=True):
        design = design_of(one)
        labels = cluster(design.astype(np.float32), count, seed=0)
        means = np.stack([design[labels == k].mean(axis=0) for k in range(count)])
        sizes = np.bincount(labels, minlength=count)
        expected = means.copy()
        expected[:, -D:] *= sizes[:, None]
        np.testing.assert_allclose(design_of(other), expected, rtol=1e-4, atol=1e-5)
        near = {"down": means[labels][:, -D:]}
        start = 0
        for name in [name for name in layer.shapes if name != "down"]:
            near[name] = means[labels][:, start : start + D].T
            start += D
            if f"{name}/bias" in one:
                near[f"{name}/bias"], start = means[labels][:, start], start + 1
        near["down/bias"] = one.get("down/bias", 0)
        approximations.append(near)
        # An expert of as many neurons, each its centroid, gives the same.
        np.testing.assert_allclose(output(other, X), output(near, X), rtol=1e-4, atol=1e-5)
    assert figures.error_per_neuron == pytest.approx(squared_error(before, approximations) / EXPERTS / F, rel=1e-4)


@pytest.mark.parametrize(("bits", "gain"), [(8, 0.85), (4, 0.7), (3, 0.62), (2, 0.52)])
def test_plain_quantisation_rounds_every_weight_to_the_nearest_level(bits, gain):
    source = source_of(GATED)
    before = experts_of(SourceLayer(source, 0))
    layer, figures, _ = compressed(source, METHODS["quantize"](bits=bits, group_size=8))
    assert (layer.moe.bank.kind, layer.moe.bank.base, layer.moe.bank.form.bits) == ("quantized", "none", bits)
    after = experts_of(layer)
    for name in layer.shapes:
        scales = np.repeat(layer.leaf(f"experts/delta/{name}/scales").astype(np.float64), 8, axis=1)
        for expert, scale in enumerate(scales):
            code = np.arange(2**bits)[:, None, None]
            levels = np.where(scale < 0, 2 * code - 2**bits, 2 * code + 1 - 2**bits) * scale
            nearest = np.abs(before[expert][name] - levels).argmin(axis=0)
            np.testing.assert_array_equal(after[expert][name], np.take_along_axis(levels, nearest[None], axis=0)[0])
    error = squared_error(before, after)
    assert figures.relative_error == pytest.approx(np.sqrt(error / norm_of(before)), rel=1e-5)
    # One level fewer, symmetric around zero, leaves the rest.
    kernels = [kernel.astype(np.float32) for expert in before for kernel in expert.values()]
    least = sum(symmetric_errors(kernel, bits, 8).sum() for kernel in kernels)
    assert error < gain * least


@pytest.mark.parametrize(("name", "options"), [("hqq", {"bits": 4}), ("nf4", {})])
def test_codes_of_the_field_are_those_of_their_coder(name, options):
    source, method = source_of(GATED), METHODS[name](group_size=8, **options)
    before = experts_of(SourceLayer(source, 0))
    layer, figures, _ = compressed(source, method)
    after, form = experts_of(layer), layer.moe.bank.form
    assert layer.moe.bank.base == "none" and form.zero_points == (name == "hqq") and form.table == (name == "nf4")
    for kernels, made in zip(before, after, strict=True):
        for matrix, kernel in kernels.items():
            given = Residual(kernel.astype(np.float32), np.dtype(np.float32))
            expected = form.encode(given, layer.matrices[matrix], method.coder)[1]
            np.testing.assert_allclose(made[matrix], expected, rtol=1e-6)
    assert 0 < figures.relative_error < 0.2


@pytest.mark.parametrize("name", ["up", "sp", "msmoe", "meo", "git-rebasin", "mlp-fusion"])
@pytest.mark.parametrize("kind", [GATED, PLAIN], ids=["gated", "plain"])
def test_what_keeps_all_keeps_the_experts(name, kind):
    source = source_of(kind)
    before = experts_of(SourceLayer(source, 0))
    layer, figures, _ = compressed(source, METHODS[name](keep=1.0))
    groups = layer.leaf("groups") if layer.moe.merged_experts is not None else range(EXPERTS)
    after = experts_of(layer)
    assert figures.relative_error < 1e-6
    for one, group in zip(before, groups, strict=True):
        np.testing.assert_allclose(output(after[group], X), output(one, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "bank"), list(zip(KEEPING, [FULL, LOW_RANK] * 4, strict=True)))
def test_the_bytes_on_the_disk_shrink_whatever_the_bank_was(name, bank, tmp_path):
    """In bfloat16 with biases; layers that are not compressed stay as they are."""
    source = source_of(PLAIN, bank, bank, dtype="bfloat16")
    report = compress(source, tmp_path / "out", METHODS[name](**KEEPING[name]), layers=[1], described={})
    out = ModelDirectory(tmp_path / "out")
    full = EXPERTS * 2 * D * F * 2
    kernels = sum(
        out.stored_bytes(path)
        for path, spec in out.specs().items()
        if path.startswith("layers/1/mlp/experts/") and not path.endswith("/bias")
    )
    # Pruned ones need their places, of merged ones two of three are left, and every leaf has a header.
    assert kernels <= 0.75 * full
    assert report.layers[0].bytes_after == kernels + sum(
        out.stored_bytes(path) for path in out.specs() if path.startswith("layers/1/mlp/experts/") and "bias" in path
    )
    assert out.config.layers[0].mlp == source.config.layers[0].mlp
    assert report.layers[0].base == "experts themselves"
    assert any("--calibrate" in line for line in report.warnings) == (name in ("msmoe", "meo", "git-rebasin"))
    for path in out.specs():
        if path.startswith("layers/1/mlp/experts/") and path.endswith(("kernel", "values", "/a", "factor", "bias")):
            assert out.specs()[path].dtype == "bfloat16"


@pytest.mark.parametrize("name", KEEPING)
def test_weights_that_are_not_finite_are_refused(name, tmp_path):
    source = source_of(GATED)
    path = "layers/0/mlp/experts/down/kernel"
    source.leaves[path] = source.leaves[path].copy()
    source.leaves[path][1, 2, 3] = np.nan
    with pytest.raises(InputError, match="1 in layer 0: 1"):
        compress(source, tmp_path / "out", METHODS[name](**KEEPING[name]), described={})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in KEEPING if name != "quantize"])
@pytest.mark.parametrize("keep", [0.0, -0.1, 1.01, float("nan")])
def test_shares_that_make_no_sense(name, keep):
    with pytest.raises(InputError, match=r"must lie in \(0, 1\]"):
        METHODS[name](keep=keep)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("up", {"keep": 0.5, "design": "both"}, "unknown design 'both'"),
        ("up", {"keep": 0.5, "bits": 5}, "bits=5"),
        ("sp", {"keep": 0.5, "design": "row"}, "unknown design 'row'"),
        ("svd", {"keep": 0.5, "design": "x"}, "unknown design 'x'"),
        ("hqq", {"bits": 5}, "bits=5 must be one"),
        ("nf4", {"group_size": 12}, "group_size=12 must be a multiple of 8"),
        ("quantize", {"bits": 5}, "bits=5 must be one"),
        ("quantize", {"bits": 8, "levels": "fitted"}, "bits=8 have no table"),
        ("quantize", {"bits": 1, "levels": "even"}, "bit has no"),
        ("quantize", {"bits": 4, "levels": "odd"}, "unknown levels 'odd'"),
        ("quantize", {"bits": 4, "group_size": 12}, "group_size=12 must be a multiple of 8"),
        ("mlp-fusion", {"keep": 0.5, "seed": -1}, "seed=-1 must not be"),
    ],
)
def test_options_that_make_no_sense(name, options, message):
    with pytest.raises(InputError) as caught:
        METHODS[name](**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "extended"), [("sp", True), ("mlp-fusion", False), ("meo", True)])
def test_a_universal_ffn_stays_as_it_is(name, extended):
    source = source_of(GATED, LOW_RANK if extended else FULL, universal="coder", extended=extended)
    layer, _, _ = compressed(source, METHODS[name](keep=0.5))
    moe = layer.moe
    assert moe.universal_beside and moe.universal_ffn.dim == F and moe.bank == FULL
    whole = SourceLayer(source, 0)
    for kernel in layer.shapes:
        if extended:
            *_, expected = whole.kernels(kernel)
        else:
            expected = source.leaves[f"layers/0/mlp/universal/{kernel}/kernel"]
        np.testing.assert_allclose(layer.leaf(f"universal/{kernel}/kernel"), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["sp", "mlp-fusion", "meo", "msmoe", "git-rebasin"])
def test_a_universal_ffn_cannot_become_a_full_expert(name):
    layer = SourceLayer(source_of(GATED, FULL, universal="coder", extended=False), 0, with_universal=True)
    with pytest.raises(InputError, match="--extended does not go"):
        METHODS[name](keep=0.5).check([layer])
