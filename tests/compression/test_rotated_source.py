"""`--rotate`: Q and what becomes of kernels in float64 NumPy, the logits of many families, and what is refused."""

import dataclasses

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_jax
from moe_jax.api.model import Model
from moe_jax.compression.rotated_source import RotatedSource, Rotation
from moe_jax.conversion import read_hf_config
from moe_jax.core.errors import InputError
from moe_jax.model_io.in_memory import LeavesInMemory, ModelInMemory
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import BankConfig
from tests.support.hf_checkpoints import CONFIGS
from tests.support.moe_models import run
from tests.support.numerics import logits_of
from tests.support.tiers import long

FAMILIES = (
    "llama-tied", "llama", "deepseek_v3", "llama-biases", "llama-wide-heads", "mistral", "qwen2", "qwen3", "gemma",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek", "deepseek_v2", "gpt_oss", "granitemoeshared",
    "ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "qwen3_next", "nemotron_h", "llama4_text",
)  # fmt: skip


def drawn(config: moe_jax.ModelConfig) -> ModelInMemory:
    """A model of random weights, whose norms have scales that differ much."""
    rng, leaves = np.random.default_rng(0), {}
    for path, spec in leaf_specs(config).items():
        values = rng.standard_normal(spec.shape) / np.sqrt(spec.shape[-2] if len(spec.shape) > 1 else 4)
        leaves[path] = np.asarray(1 + values if path.endswith("norm/scale") else values, spec.dtype)
    return ModelInMemory(config, LeavesInMemory(leaves))


def of_family(name: str) -> ModelInMemory:
    return drawn(read_hf_config(CONFIGS[name]))


def matrix(rotation: Rotation) -> np.ndarray:
    """`diag(signs) (small ⊗ H / sqrt(2^k))`, float64."""
    count = len(rotation.signs) // len(rotation.small)
    hadamard = scipy.linalg.hadamard(count) / np.sqrt(count)
    return rotation.signs.astype(np.float64)[:, None] * np.kron(rotation.small.astype(np.float64), hadamard)


@settings(max_examples=25)
@given(width=st.integers(1, 80), seed=st.integers(0, 1000))
def test_a_rotation_is_that_matrix_and_orthogonal(width, seed):
    rotation, rows = Rotation.drawn(width, seed), np.random.default_rng(seed).standard_normal((3, width))
    whole = matrix(rotation)
    np.testing.assert_allclose(whole @ whole.T, np.eye(width), atol=1e-5)
    np.testing.assert_allclose(rotation(rows), rows @ whole, atol=1e-5)
    np.testing.assert_allclose(rotation.from_left(rows.T), whole.T @ rows.T, atol=1e-5)


def test_another_seed_is_another_rotation():
    one, same, other = (matrix(Rotation.drawn(12, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.1


def test_leaves_are_those_of_the_formula():
    """Of a gated MoE with biases: folded scales, `Q^T W` for what reads, `W Q` for what writes, values by head."""
    source = of_family("gpt_oss")
    config, rotated = source.config, RotatedSource(source)
    attention, q = config.layers[0].softmax_attention, matrix(Rotation.drawn(config.d_model, 0))
    heads = np.kron(np.eye(attention.num_kv_heads), matrix(Rotation.drawn(attention.head_dim, 0)))
    all_heads = np.kron(np.eye(attention.num_heads), matrix(Rotation.drawn(attention.head_dim, 0)))

    def before(path: str) -> np.ndarray:
        return source.read(path).astype(np.float64)

    def layer(below: str) -> str:
        return f"layers/0/{below}"

    of_attention, of_mlp = (before(layer(f"{name}_norm/scale"))[:, None] for name in ("attention", "mlp"))
    expected = {
        "embed/embedding": before("embed/embedding") @ q,
        "lm_head/kernel": q.T @ (before("final_norm/scale")[:, None] * before("lm_head/kernel")),
        layer("attention/q/kernel"): q.T @ (of_attention * before(layer("attention/q/kernel"))),
        layer("attention/v/kernel"): q.T @ (of_attention * before(layer("attention/v/kernel"))) @ heads,
        layer("attention/v/bias"): before(layer("attention/v/bias")) @ heads,
        layer("attention/o/kernel"): all_heads.T @ before(layer("attention/o/kernel")) @ q,
        layer("attention/o/bias"): before(layer("attention/o/bias")) @ q,
        layer("mlp/router/kernel"): q.T @ (of_mlp * before(layer("mlp/router/kernel"))),
        layer("mlp/experts/gate/kernel"): q.T @ (of_mlp * before(layer("mlp/experts/gate/kernel"))),
        layer("mlp/experts/down/kernel"): before(layer("mlp/experts/down/kernel")) @ q,
        layer("mlp/experts/down/bias"): before(layer("mlp/experts/down/bias")) @ q,
    }
    for path, leaf in expected.items():
        np.testing.assert_allclose(rotated.read(path), leaf, atol=1e-5, err_msg=path)
    for path in ("attention/q/bias", "attention/sinks", "mlp/experts/up/bias", "mlp/router/bias"):
        np.testing.assert_array_equal(rotated.read(layer(path)), source.read(layer(path)))
    for path in (layer("attention_norm/scale"), layer("mlp_norm/scale"), "final_norm/scale"):
        assert (rotated.read(path) == 1).all()


@pytest.mark.parametrize(
    "family", [name if name == FAMILIES[0] else pytest.param(name, marks=long) for name in FAMILIES]
)
def test_logits_stay_the_same(family):
    source = of_family(family)
    rotated = RotatedSource(source)
    tokens = np.random.default_rng(1).integers(0, source.config.vocab_size, (2, 12)).astype(np.int32)
    expected = logits_of(Model.of_source(source).decoder, tokens)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(logits_of(Model.of_source(rotated).decoder, tokens), expected, atol=2e-5)
    assert {path: spec.shape for path, spec in leaf_specs(rotated.config).items()} == {
        path: spec.shape for path, spec in rotated.specs().items()
    }
    moved = np.abs(rotated.read("embed/embedding") - source.read("embed/embedding"))
    assert moved.max() > 0.1 and rotated.fingerprint() != source.fingerprint()


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("phi", "has norm='layer'"),
        ("gemma2", "norm_position='both'"),
        ("olmo2", "norm_position='output'"),
        ("t5", "model with an encoder"),
        ("gemma4_text", "layer 0 has"),
    ],
)
def test_what_a_rotation_would_change(family, message):
    with pytest.raises(InputError, match=message):
        RotatedSource(of_family(family))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learned_positions": True}, "learned positions"),
        ({"num_classes": 3}, "scores classes"),
        ({"layers": {"branch_scales": True}}, "branch scales"),
        ({"mlp": {"bank": BankConfig(kind="low-rank", rank=2)}}, "experts that are"),
    ],
)
def test_parts_that_do_not_commute(changes, message):
    config = read_hf_config(CONFIGS["mixtral"])
    layers = config.layers
    for name, own in (("layers", changes.get("layers")), ("mlp", changes.get("mlp"))):
        if own is not None:
            given = own if name == "layers" else {"mlp": dataclasses.replace(layers[0].mlp, **own)}
            changes, layers = {}, (dataclasses.replace(layers[0], **given), *layers[1:])
    with pytest.raises(InputError, match=message):
        RotatedSource(drawn(dataclasses.replace(config, layers=layers, **changes)))


def test_no_imatrix_of_the_model_as_it_was(models, tmp_path, failing):
    options = ("--method", "quantize", "--bits", 4, "--rotate", "--imatrix", tmp_path / "none.gguf")
    assert "not go with --rotate" in failing(models["one"], tmp_path / "out", *options)


@long
@pytest.mark.parametrize("base", [False, True])
def test_on_the_command_line(base, models, tmp_path, out_of, text):
    """Eight bits around nothing, or around the rotated dense model: nearly the losses of the model."""
    calibrated = ("--calibrate", text, "--seq-len", 16, "--samples", 4, "--calibration-dir", tmp_path / "recorded")
    method = ("--method", "ders-quantize", "--base", models["dense"]) if base else ("--method", "quantize")
    assert run(models["moe"], tmp_path / "out", *method, "--bits", 8, "--rotate", *calibrated) == 0
    losses = [
        float(out_of("eval", model, "--text", text, "--seq-len", 48, "--json").split('"nll": ')[1].split(",")[0])
        for model in (models["moe"], tmp_path / "out")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
