"""`--rounding learnt`: the formula in float64 NumPy, a step of signed descent, and what is gained on a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.calibration.expert_statistics import weighted_tokens
from moe_jax.compression.coding import learnt_rounding
from moe_jax.compression.coding.learnt_rounding import Rounding, Start, fresh, rounded, squared_error
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.experts.forms import Quantized
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from tests.compression.methods.recorded_layers import calibration_of, recorded
from tests.compression.methods.test_baselines import D, F, compressed, experts_of, output
from tests.support.moe_models import memory_moe, run
from tests.support.tiers import long, one_in

E, TOKENS, GROUP = 4, 300, 8
SHAPES = {"gated": {"d_model": D, "dim": F}, "plain": {"d_model": D, "dim": F, "gated": False, "bias": True}}
FORMS = {
    "odd and even": {},
    "zero points": {"zero_points": True},
    "one scale": {"group_size": None},
    "scales of 8 bits": {"scale_bits": 8},
    "row scales": {"row_scales": True},
}


def drawn_start(form: Quantized, rows: int, columns: int, *, seed: int = 0) -> Start:
    random = np.random.default_rng(seed)
    groups = (1, 1) if form.group_size is None else (-(-rows // form.group_size), columns)
    scales = random.uniform(0.1, 0.5, groups) * random.choice([1, -1], groups)
    zeros = random.integers(0, 256, groups) / 2 ** (8 - form.bits) if form.zero_points else None
    of_codes = jnp.asarray(np.abs(scales) if form.zero_points else scales, jnp.float32)
    if form.scale_bits == 16:
        of_codes = of_codes.astype(jnp.bfloat16).astype(jnp.float32)
    targets = jnp.asarray(random.standard_normal((rows, columns)), jnp.float32)
    base = jnp.asarray(random.standard_normal((rows, columns)), jnp.float32)
    rows = jnp.asarray(2.0 ** random.integers(-2, 3, (rows, 1)), jnp.float32) if form.row_scales else None
    return Start(targets, of_codes, None if zeros is None else jnp.asarray(zeros, jnp.float32), base, rows)


def kernel_by_formula(start: Start, rounding: Rounding, form: Quantized) -> np.ndarray:
    """`B + 2 r s (clip(floor(w / (2 r s) + z + v + 1/2)) - z)`, entry by entry, with scales as they are stored."""
    targets, base, offsets = (np.asarray(a, np.float64) for a in (start.values, start.base, rounding.offsets))
    wanted = np.asarray(start.scales, np.float64) * np.asarray(rounding.factors, np.float64)
    if form.scale_bits == 16:
        scales = wanted.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    else:
        steps = np.abs(wanted).max(axis=1, keepdims=True).astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
        codes = np.sign(wanted) * np.clip(np.round(127 * np.sqrt(np.abs(wanted) / steps)), 0, 127)
        scales = steps * codes * np.abs(codes) / 127**2
    made = np.empty_like(targets)
    for i, j in np.ndindex(targets.shape):
        at = (0, 0) if form.group_size is None else (i // form.group_size, j)
        s, n = scales[at], 2**form.bits
        z = (n - 1 if s >= 0 else n) / 2 if start.zeros is None else float(start.zeros[at])
        r = 1.0 if start.rows is None else float(start.rows[i, 0])
        q = np.clip(np.floor(targets[i, j] / (2 * r * s) + z + offsets[i, j] + 0.5), 0, n - 1)
        made[i, j] = base[i, j] + 2 * r * s * (q - z)
    return made


@one_in(3)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("bits", [3, 1])
def test_codes_are_those_of_the_formula(kind, bits):
    form = Quantized(**({"bits": bits, "group_size": GROUP} | FORMS[kind]))
    start, random = drawn_start(form, 20, 6), np.random.default_rng(1)
    factors = (
        np.broadcast_to(1.0, start.scales.shape)
        if form.scale_bits == 8
        else random.uniform(0.5, 1.5, start.scales.shape)
    )
    rounding = Rounding(
        jnp.asarray(random.uniform(-0.5, 0.5, start.values.shape), jnp.float32), jnp.asarray(factors, jnp.float32)
    )
    expected = kernel_by_formula(start, rounding, form)
    made = rounded(start, rounding, form)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)
    leaves, numbers = learnt_rounding._encoded(start, rounding, form)
    np.testing.assert_allclose(numbers, expected - np.asarray(start.base, np.float64), rtol=1e-5, atol=1e-5)
    assert ("zeros" in leaves) == form.zero_points and ("scale_codes" in leaves) == (form.scale_bits == 8)


@long
def test_a_step_goes_against_the_gradient_that_passes_the_rounding():
    """For the FFN `silu(x G) (x U) D`; the gradient by hand, in float64: that of the kernel, times its slope."""
    random, form = np.random.default_rng(2), Quantized(bits=2, group_size=GROUP)
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    starts = {name: drawn_start(form, *shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    kernels = {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    x, weights = random.standard_normal((30, D)).astype(np.float32), random.uniform(0, 1, 30).astype(np.float32)
    now, rate = {name: fresh(start) for name, start in starts.items()}, 0.25
    forms = tuple((name, form) for name in shapes)
    moved = learnt_rounding._moved(now, starts, kernels, {}, x, weights, jnp.float32(rate), forms, "silu")
    made = {name: kernel_by_formula(starts[name], now[name], form) for name in shapes}
    true = {name: np.asarray(kernel, np.float64) for name, kernel in kernels.items()}
    z, up = x @ made["gate"], x @ made["up"]
    gate, share = z / (1 + np.exp(-z)), 1 / (1 + np.exp(-z))
    slope_y = 2 * weights[:, None] * ((gate * up) @ made["down"] - output(true, x.astype(np.float64)))
    slope_h = slope_y @ made["down"].T
    slopes = {
        "down": (gate * up).T @ slope_y,
        "up": x.T @ (slope_h * gate),
        "gate": x.T @ (slope_h * up * (share * (1 + z * (1 - share)))),
    }
    for name, slope in slopes.items():
        start, every = starts[name], np.repeat(np.asarray(starts[name].scales, np.float64), GROUP, axis=0)
        place = np.asarray(start.values, np.float64) / (2 * every) + np.where(every < 0, 2, 1.5)
        inside = (place > 0) & (place < 3)
        sure = np.abs(slope) > 1e-3 * np.abs(slope).max()
        expected = np.where(inside, -rate * np.sign(slope * every), 0)
        np.testing.assert_allclose(np.asarray(moved[name].offsets)[sure], expected[sure], atol=1e-7)
        # The scale: dQ/ds = (Q - t) / s inside, Q / s where codes are cut off.
        numbers = made[name] - np.asarray(start.base, np.float64)
        own = np.where(inside, numbers - np.asarray(start.values, np.float64), numbers)
        sums = (slope * own).reshape(-1, GROUP, slope.shape[1]).sum(axis=1)
        sure = np.abs(sums) > 1e-3 * np.abs(sums).max()
        np.testing.assert_allclose(np.asarray(moved[name].factors)[sure], (1 - rate * np.sign(sums))[sure], atol=1e-6)
    assert squared_error(now, starts, kernels, {}, x, weights, forms, "silu") > 0


def output_error(layer: SourceLayer, other: SourceLayer) -> float:
    """The sum over experts of the weighted squared errors of their outputs, float64."""
    total = 0.0
    for e, (before, after) in enumerate(zip(experts_of(layer), experts_of(other), strict=True)):
        _, x, weights = weighted_tokens(layer, e)
        errors = output(before, x.astype(np.float64)) - output(after, x.astype(np.float64))
        total += float(weights.astype(np.float64) @ (errors**2).sum(axis=1))
    return total


CASES = {
    "quantize": ("quantize", {"bits": 2}),
    "deltas": ("ders-quantize", {"bits": 2, "centre_bits": "4", "centre_group_size": 8}),
    "zero points": ("quantize", {"bits": 3, "zero_points": True}),
    "scales of 8 bits": ("quantize", {"bits": 4, "scale_bits": 8}),
    "one bit": ("ders-quantize", {"bits": 1, "row_scales": True}),
}


@one_in(10)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_nearer_than_where_learning_began(case, shape):
    source = memory_moe(BankConfig(), noise=0.5, shape=SHAPES[shape], num_experts=E)
    known = recorded(source, tokens=TOKENS, unused=1)
    layer, (name, options) = SourceLayer(source, 0, calibration=known), CASES[case]
    options = {"group_size": GROUP, "feedback": False, **options}
    nearest, before, _ = compressed(source, make_method(name, options), calibration=known)
    learnt, after, _ = compressed(source, make_method(name, {**options, "rounding": "learnt"}), calibration=known)
    assert learnt.moe == nearest.moe
    assert output_error(layer, learnt) < 0.97 * output_error(layer, nearest)
    assert before.output_error is not None and after.output_error is not None


@long
def test_the_best_is_never_worse_than_the_start(monkeypatch):
    """Steps that only harm: what is looked at is worse than the start, which stays."""
    monkeypatch.setattr(learnt_rounding, "_moved", lambda now, *rest: jax.tree.map(lambda a: a + 0.5, now))
    source = memory_moe(BankConfig(), noise=0.5, shape=SHAPES["gated"], num_experts=2)
    known = recorded(source, tokens=TOKENS)
    options = {"bits": 3, "group_size": GROUP, "feedback": False}
    nearest, _, _ = compressed(source, make_method("quantize", options), calibration=known)
    learnt, _, _ = compressed(source, make_method("quantize", {**options, "rounding": "learnt"}), calibration=known)
    for name in nearest.shapes:
        for one, other in zip(nearest.kernels(name), learnt.kernels(name), strict=True):
            np.testing.assert_array_equal(one, other)


def test_needs_a_text_and_levels_at_equal_distances(models, tmp_path, failing):
    options = ("--method", "quantize", "--bits", 4, "--rounding", "learnt")
    assert "give one with --calibrate TEXT" in failing(models["one"], tmp_path / "out", *options)
    for given, message in (
        ({"rounding_steps": 3}, "goes with rounding=learnt"),
        ({"rounding": "learnt", "levels": "fitted"}, "at equal distances"),
        ({"rounding": "learnt", "rounding_steps": 0}, "rounding_steps=0 must"),
        ({"rounding": "up"}, "rounding"),
    ):
        with pytest.raises(InputError, match=message):
            make_method("quantize", {"bits": 4, **given})


@long
def test_on_the_command_line(models, tmp_path, out_of, text):
    calibrated = ("--calibrate", text, "--seq-len", 16, "--samples", 4, "--calibration-dir", tmp_path / "recorded")
    options = ("--method", "ders-quantize", "--bits", 2, "--rounding", "learnt", "--rounding-steps", 60)
    assert run(models["one"], tmp_path / "out", *options, *calibrated) == 0
    assert "nll" in out_of("eval", tmp_path / "out", "--text", text, "--seq-len", 48)


@long
def test_the_same_twice(tmp_path):
    source = memory_moe(BankConfig(), noise=0.5, shape=SHAPES["gated"], num_experts=2)
    known = recorded(source, tokens=TOKENS)
    method = make_method("quantize", {"bits": 2, "group_size": GROUP, "rounding": "learnt", "rounding_steps": 7})
    found = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "out"
        compress(source, out, method, calibration=calibration_of(known, tmp_path / name), described={})
        found.append(out)
    one, other = map(ModelDirectory, found)
    assert all(np.array_equal(one.read(path), other.read(path)) for path in one.specs())
