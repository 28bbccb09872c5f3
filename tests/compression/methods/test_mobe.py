"""`mobe` against plain NumPy: what is stored, what the optimisation finds, and a compressed model put to use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.compression import compress, make_method
from moe_jax.compression.coding.storage import disk_bytes, layer_bytes
from moe_jax.compression.methods.mobe import MixedFactors, mixed_factors, squared_error, starting_factors
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts import BankConfig
from moe_jax.experts.forms import MixtureOfBases
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from tests.compression.methods.test_baselines import experts_of
from tests.support.moe_models import RECIPE, memory_moe, run, same_weights
from tests.support.numerics import assert_close
from tests.support.tiers import long, one_in

E = 8
SHAPES = {
    "narrow": {"d_model": 24, "dim": 16},
    "wide": {"d_model": 16, "dim": 24},
    "plain": {"d_model": 24, "dim": 16, "gated": False, "bias": True},
}
FEW = {"keep": 0.6, "bases": 2, "steps": 60}
ACTIVATIONS = {"silu": lambda z: z / (1 + np.exp(-z)), "tanh": np.tanh}


def reference(bases: np.ndarray, logits: np.ndarray, own: np.ndarray, activation: str) -> np.ndarray:
    """Kernels [E, w, s], float64, one after another."""
    kernels = []
    for row, a in zip(logits.astype(np.float64), own.astype(np.float64), strict=True):
        alpha = np.exp(row) / np.exp(row).sum()
        mixed = sum(share * basis.astype(np.float64) for share, basis in zip(alpha, bases, strict=True))
        kernels.append(ACTIVATIONS[activation](mixed) @ a)
    return np.stack(kernels)


def planted(seed: int, activation: str = "silu") -> tuple[MixedFactors, MixtureOfBases]:
    """Factors of normal numbers."""
    random = np.random.default_rng(seed)
    shapes = ((2, 24, 4), (E, 2), (E, 4, 16))
    form = MixtureOfBases(rank=4, bases=2, activation=activation)
    return MixedFactors(*(random.standard_normal(shape).astype(np.float32) for shape in shapes)), form


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_error_and_its_gradient_are_those_of_plain_sums(activation):
    factors, form = planted(0, activation)
    target = np.random.default_rng(1).standard_normal((E, 24, 16)).astype(np.float32)
    made = reference(*factors, activation)
    error_and_gradient = jax.jit(jax.value_and_grad(lambda factors: squared_error(factors, target, form.mix)))
    value, gradient = error_and_gradient(MixedFactors(*map(jnp.asarray, factors)))
    assert float(value) == pytest.approx(((made - target) ** 2).mean(), rel=1e-5)
    for field, found in zip(MixedFactors._fields, gradient, strict=True):
        for index in ((0, 0, 1)[: found.ndim], (1, 1, 2)[: found.ndim]):
            sides = []
            for step in (1e-4, -1e-4):
                moved = getattr(factors, field).astype(np.float64)
                moved[index] += step
                sides.append(((reference(*factors._replace(**{field: moved}), activation) - target) ** 2).mean())
            assert float(found[index]) == pytest.approx((sides[0] - sides[1]) / 2e-4, rel=1e-3, abs=1e-7)


def test_experts_that_are_mixed_of_bases_are_found_again():
    """Of groups in which one basis leads: of others Adam may stop farther away, in another local minimum."""
    factors, form = planted(2)
    leading = np.repeat(3 * np.eye(2, dtype=np.float32), E // 2, axis=0)
    factors = factors._replace(logits=factors.logits + leading)
    target = reference(*factors, "silu").astype(np.float32)

    def error(found: MixedFactors) -> float:
        made = reference(*map(np.asarray, found), "silu")
        return float(((made - target) ** 2).sum() / (target**2).sum())

    found = mixed_factors(target, 4, 2, form.mix, steps=1500, rate=0.02)
    scale = target.std()
    assert error(found) < 0.01
    start = starting_factors(target / scale, 4, 2, form.mix)
    assert error(found) < 0.1 * error(start._replace(own=np.asarray(start.own) * scale))
    again = mixed_factors(target, 4, 2, form.mix, steps=1500, rate=0.02)
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))


@one_in(2)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_stored_is_what_the_figures_and_the_plan_say(kind, dtype, tmp_path):
    source = memory_moe(BankConfig(), noise=0.5, shape=SHAPES[kind], num_experts=E, dtype=dtype)
    before = experts_of(SourceLayer(source, 0))
    report = compress(source, tmp_path / "out", make_method("mobe", FEW), described={}).layers[0]
    small = SourceLayer(ModelDirectory(tmp_path / "out"), 0)
    after, error, norm = experts_of(small), 0.0, 0.0
    for name in small.shapes:
        at = f"experts/delta/{name}"
        if name == "down":
            kernels = small.leaf(f"{at}/kernel").astype(np.float64)
            np.testing.assert_array_equal(kernels, np.stack([expert[name] for expert in before]))
        else:
            mixed, own = ("b", "a") if kind == "wide" else ("a", "b")
            bases, logits, factor = (small.leaf(f"{at}/{leaf}") for leaf in (f"basis/{mixed}", "mixture", own))
            assert bases.dtype == factor.dtype == dtype and len(bases) == 2
            if own == "b":
                kernels = reference(bases, logits, factor, "silu")
            else:
                turned = reference(bases.swapaxes(1, 2), logits, factor.swapaxes(1, 2), "silu")
                kernels = turned.swapaxes(1, 2)
        for one, other, kernel in zip(before, after, kernels, strict=True):
            # Mixed factors are rounded to bfloat16 there.
            np.testing.assert_allclose(other[name], kernel, rtol=1e-4, atol=1e-5 if dtype == "float32" else 0.02)
            error += ((one[name] - other[name]) ** 2).sum()
            norm += (one[name] ** 2).sum()
    assert report.relative_error == pytest.approx(np.sqrt(error / norm), rel=1e-3)
    d_model, counted = small.shapes["up"][0], np.dtype(small.dtype("up"))
    held = sum(small.leaf(path).nbytes for path in small.leaves if path.startswith("experts/"))
    assert layer_bytes(small.moe, d_model, counted).total == held
    assert held <= report.bytes_after <= disk_bytes(small.moe, d_model, counted)


def test_more_steps_are_no_worse_than_the_start():
    target = np.random.default_rng(3).standard_normal((E, 24, 16)).astype(np.float32)
    form = MixtureOfBases(rank=8, bases=2)
    errors = []
    for steps in (1, 300):
        found = mixed_factors(target, 8, 2, form.mix, steps=steps, rate=0.02)
        errors.append(((reference(*map(np.asarray, found), "silu") - target) ** 2).sum())
    assert errors[1] < errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 16, "bases": 8}, "nothing is gained"),
        ({"keep": 0.5, "bases": 9}, "bases=9 are .* the 8 experts of layer 0"),
        ({"rank": 17}, "rank 17 is above min"),
        ({"keep": 0.5, "rank": 3}, "same in two"),
        ({"keep": 1.5}, "keep=1.5 must lie in"),
        ({"keep": 0.5, "rate": 2.0}, "rate=2 must lie in"),
        ({"keep": 0.5, "activation": "relu"}, "unknown activation 'relu'"),
        ({"keep": 0.5, "steps": 0}, "steps"),
    ],
)
def test_what_makes_no_sense(options, message):
    source = memory_moe(BankConfig(), shape=SHAPES["narrow"], num_experts=E)
    with pytest.raises(InputError, match=message):
        make_method("mobe", options).check([SourceLayer(source, 0)])


def test_there_is_no_shared_base():
    with pytest.raises(InputError, match="shared base"):
        BankConfig(kind="mixture-of-bases", rank=2, bases=1)


@long
def test_a_compressed_model_is_put_to_use(models, tmp_path, text):
    """Generates, over a mesh too, is tuned, trained, exported and compressed again."""
    options = ("--method", "mobe", "--keep", 0.5, "--steps", 20)
    for name in ("out", "again"):
        assert run(models["one"], tmp_path / name, *options) == 0
    assert same_weights(tmp_path / "out", tmp_path / "again")
    source = open_source(tmp_path / "out")
    tokens = jax.random.randint(jax.random.key(0), (8, 12), 0, source.config.vocab_size)
    expected = jax.jit(load_model(source))(tokens).logits
    mesh = make_mesh({"fsdp": 2, "tensor": 2, "data": 2})
    with jax.set_mesh(mesh):
        assert_close(jax.jit(load_model(source, mesh=mesh))(tokens).logits, expected)
    assert cli.main(["export", str(tmp_path / "out"), str(tmp_path / "hf")]) == 0
    exported = open_source(tmp_path / "hf")
    assert_close(jax.jit(load_model(exported))(tokens).logits, expected)
    adapt = ["--method", "perft-r", "--adapter", "lora:2", "--experts", "2", "--top-k", "1"]
    assert cli.main(["adapt", str(tmp_path / "out"), str(tmp_path / "tuned"), *adapt]) == 0
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))
    assert cli.main(["train", str(tmp_path / "recipe.toml")]) == 0
    before, after = ModelDirectory(tmp_path / "out"), ModelDirectory(tmp_path / "run" / "model")
    leaves = [path for path in before.specs() if "/delta/" in path]
    assert leaves and all(np.abs(after.read(path) - before.read(path)).max() > 0 for path in leaves)
