"""`reap`: which experts are removed, what stays of them and of the router, and what cannot be pruned so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.calibration.recording import NOT_YET_RECORDED, LayerCalibration
from moe_jax.compression.coding.storage import REMOVED, stored_bytes
from moe_jax.compression.methods.fewer_experts import weighted_output_norms
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.experts import Mixed
from moe_jax.experts.forms import Quantized
from moe_jax.functional.routing.route import route
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from moe_jax.models.moe_config import SelectionConfig
from tests.compression.methods.recorded_layers import calibration_of, recorded
from tests.compression.methods.test_baselines import D, F, experts_of, norm_of, output
from tests.support.dense_models import dense_config
from tests.support.moe_models import RECIPE, MemorySource, memory_moe, moe_config, run
from tests.support.tiers import long

E = 6
SHAPES = {"gated": {"d_model": D, "dim": F}, "plain": {"d_model": D, "dim": F, "gated": False, "bias": True}}
BANKS = {
    "full": {},
    "deltas": {"bank": BankConfig(kind="low-rank", rank=2)},
    "codes": {"bank": BankConfig(kind="quantized", bits=4, group_size=8)},
    "in the bank": {"bank": BankConfig(kind="low-rank", rank=2), "universal": "med", "extended": True},
    "bias": {"selection": SelectionConfig(bias=True), "expert_scales": True},
}


def source_of(shape: str = "gated", bank: BankConfig | None = None, **moe):
    moe = {"num_experts": E, **moe}
    source = memory_moe(bank or BankConfig(), noise=1.0, shape=SHAPES[shape], **moe)
    if source.config.moe(0).selection.bias:
        source.leaves["layers/0/mlp/router/selection_bias"] = np.linspace(-1, 1, E, dtype=np.float32)
    if source.config.moe(0).expert_scales:
        source.leaves["layers/0/mlp/router/expert_scale"] = np.linspace(1, 2, E, dtype=np.float32)
    return source


def saliency_as_published(layer: SourceLayer) -> np.ndarray:
    """Equation by equation, float64: over the tokens of an expert, the mean of its router weight times its norm."""
    assert layer.rows is not None
    x, found = layer.rows.inputs.astype(np.float64), []
    for j, expert in enumerate(experts_of(layer)):
        terms = [
            weight * np.linalg.norm(output(expert, x[t]))
            for t in range(len(x))
            for chosen, weight in zip(layer.rows.experts[t], layer.rows.weights[t].astype(np.float64), strict=True)
            if chosen == j
        ]
        found.append(np.mean(terms) if terms else 0.0)
    return np.array(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_saliency_is_the_mean_weighted_norm_of_the_outputs(shape):
    source = source_of(shape)
    layer = SourceLayer(source, 0, calibration=recorded(source, unused=1))
    expected = saliency_as_published(layer)
    assert expected[-1] == 0 and len(set(expected)) == E
    shares = []
    np.testing.assert_allclose(weighted_output_norms(layer, shares.append), expected, rtol=1e-5)
    np.testing.assert_allclose(shares, np.arange(1, E + 1) / E)
    kept = make_method("reap", {"keep": 0.5}).analyse(layer)["kept"]
    assert kept.tolist() == sorted(np.argsort(-expected)[:3])


def test_by_frequency_the_most_used_stay():
    source = source_of()
    known = recorded(source)
    layer = SourceLayer(source, 0, calibration=known)
    kept = make_method("reap", {"keep": 0.5, "criterion": "frequency"}).analyse(layer)["kept"]
    assert kept.tolist() == sorted(np.argsort(-known.statistics.usage)[:3])
    assert kept.tolist() != make_method("reap", {"keep": 0.5}).analyse(layer)["kept"].tolist()


MADE = {
    "coded base": ("ders-quantize", {"bits": 4, "group_size": 8, "centre_bits": "4", "centre_group_size": 8}),
    # As many bases as experts: their axis is no axis of experts.
    "shared bases": ("mobe", {"keep": 0.9, "bases": E, "steps": 1}),
}


@pytest.mark.parametrize("kind", [*BANKS, *MADE])
def test_what_stays_is_not_changed_by_a_bit(kind, tmp_path):
    source = source_of(**BANKS.get(kind, {}))
    if kind in MADE:
        compress(source, tmp_path / "made", make_method(*MADE[kind]), described={})
        source = ModelDirectory(tmp_path / "made")
    known = recorded(source)
    method = make_method("reap", {"keep": 0.5})
    how = {"calibration": calibration_of(known, tmp_path), "described": {}}
    said = []
    written = compress(source, tmp_path / "out", method, **how, on_layer=lambda *done: said.append(done[2]))
    report = written.layers[0]
    kept = method.analyse(SourceLayer(source, 0, calibration=known))["kept"]
    out = ModelDirectory(tmp_path / "out")
    moe, before = out.config.moe(0), source.config.moe(0)
    assert moe == dataclasses.replace(before, num_experts=3)
    of_bank = [*kept, E] if before.extended else kept
    for path in source.specs():
        expected = leaf = source.read(path)
        if "/router/" in path:
            expected = leaf[..., kept]
        elif "/mlp/experts/" in path and "/base/" not in path and "/basis/" not in path:
            expected = leaf[of_bank]
        assert out.read(path).tobytes() == np.ascontiguousarray(expected).tobytes(), path
    assert report.choice == "without " + " ".join(str(e) for e in range(E) if e not in kept)
    if kind == "full":
        experts = experts_of(SourceLayer(source, 0))
        lost = norm_of([expert for e, expert in enumerate(experts) if e not in kept]) / norm_of(experts)
        assert report.relative_error == pytest.approx(np.sqrt(lost), rel=1e-5)
    assert any("/base/" in path and path.endswith("codes") for path in out.specs()) == (kind == "coded base")
    (counted,) = stored_bytes(source.config, [0], [REMOVED], {"keep": 0.5}, dtype="float32")
    assert said == [counted.expert_bytes]
    assert counted.expert_bytes == sum(out.read(path).nbytes for path in out.specs() if "/experts/" in path)
    assert counted.model_bytes == sum(out.read(path).nbytes for path in out.specs())


def test_the_router_chooses_as_if_the_others_were_never_the_best():
    source = source_of()
    known = recorded(source)
    kept = make_method("reap", {"keep": 0.5}).analyse(SourceLayer(source, 0, calibration=known))["kept"]
    assert known.rows is not None
    logits = known.rows.inputs.astype(np.float32) @ source.leaves["layers/0/mlp/router/kernel"]
    without = np.full_like(logits, -1e30)
    without[:, kept] = logits[:, kept]
    chosen = jax.jit(route, static_argnums=(1, 2))
    whole, _ = chosen(jnp.asarray(without), 2, "topk_softmax")
    pruned, _ = chosen(jnp.asarray(logits[:, kept]), 2, "topk_softmax")
    np.testing.assert_array_equal(kept[np.asarray(pruned.experts)], whole.experts)
    np.testing.assert_allclose(pruned.weights, whole.weights, atol=1e-6)


@pytest.mark.parametrize(
    ("moe", "keep", "message"),
    [
        ({}, 0.17, r"keep=0.17 leaves 1 of 6 experts in layer 0, .* to top_k=2; keep at least 0.333"),
        ({"universal": "coder"}, 0.5, "universal 'coder' has a gate"),
        ({"selection": SelectionConfig(groups=2, top_groups=2)}, 0.5, "chosen by groups=2"),
        ({"merged_experts": 3}, 0.5, "experts are merged"),
    ],
)
def test_what_cannot_be_pruned(moe, keep, message):
    with pytest.raises(InputError, match=message):
        make_method("reap", {"keep": keep}).check([SourceLayer(source_of(**moe), 0)])


def test_experts_in_parts_are_refused_before_the_text_is_looked_at():
    few, many = (Quantized(bits=bits, group_size=8) for bits in (2, 4))
    parts = BankConfig(Mixed(parts=(few, many), part_of=(0, 1) * (E // 2)), base="none")
    config = moe_config(dense_config(num_layers=1, **SHAPES["gated"]), parts, num_experts=E)
    layers = [SourceLayer(MemorySource(config, {}), 0, calibration=NOT_YET_RECORDED)]
    with pytest.raises(InputError, match="in parts"):
        make_method("reap", {"keep": 0.5}).check(layers)
    make_method("ream", {"keep": 0.5}).check(layers)  # it makes full experts


def test_a_universal_ffn_does_not_become_a_delta():
    layer = SourceLayer(source_of(universal="med"), 0, with_universal=True)
    with pytest.raises(InputError, match="--extended does not go"):
        make_method("reap", {"keep": 0.5}).check([layer])


def test_needs_a_text():
    source = source_of()
    only_used = LayerCalibration(recorded(source).statistics)
    recorded_one = SourceLayer(source, 0, calibration=recorded(source))
    make_method("reap", {"keep": 0.5}).check([recorded_one])
    for known in (None, only_used):
        with pytest.raises(InputError, match="give one with --calibrate TEXT"):
            make_method("reap", {"keep": 0.5}).check([recorded_one, SourceLayer(source, 0, calibration=known)])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"keep": 0.0}, r"keep=0 must lie in \(0, 1\]"), ({"keep": 0.5, "criterion": "norm"}, "unknown criterion 'norm'")],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        make_method("reap", options)


@long
def test_the_result_is_a_model_like_any_other(models, tmp_path, out_of, text, failing):
    reap = ("--method", "reap", "--keep", 0.67)
    assert "give one with --calibrate TEXT" in failing(models["one"], tmp_path / "out", *reap)
    calibrated = ("--calibrate", text, "--seq-len", 16, "--samples", 4, "--calibration-dir", tmp_path / "recorded")
    # Said before the model runs over the text: `failing` sees that nothing is recorded.
    fewer = failing(models["one"], tmp_path / "out", *reap[:-1], 0.34, *calibrated)
    assert "keep=0.34 leaves 1 of 3 experts in layer 0" in fewer
    assert run(models["one"], tmp_path / "out", *reap, *calibrated) == 0
    assert ModelDirectory(tmp_path / "out").config.moe(0).num_experts == 2
    out_of("export", tmp_path / "out", tmp_path / "hf")
    assert "nll" in out_of("eval", tmp_path / "hf", "--text", text, "--seq-len", 48)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))
    out_of("train", tmp_path / "recipe.toml")
    assert ModelDirectory(tmp_path / "run" / "model").config.moe(0).num_experts == 2
