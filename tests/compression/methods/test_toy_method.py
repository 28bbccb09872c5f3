"""A method of compression that the library does not know, from the command line to a model that is used."""

import dataclasses
import json

import numpy as np
import pytest

from moe_jax.compression.coding.storage import FULL, layer_bytes
from moe_jax.compression.methods.interface import Method
from moe_jax.compression.methods.narrower import check_full, full_target
from moe_jax.compression.report import Measure
from moe_jax.compression.source_layer import mean_kernel
from moe_jax.compression.spec import METHODS, make_method
from moe_jax.core.errors import InputError
from moe_jax.core.form_options import check_keep
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.numerics import logits_of
from tests.support.tiers import long


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToTheMean(Method):
    """Experts moved towards their mean, a method that saves nothing.

    Attributes:
      keep: share of what an expert differs by that stays, in (0, 1].
    """

    swept = ("keep", (0.5, 1.0))
    layouts = (FULL,)

    keep: float

    def __post_init__(self):
        check_keep(self.keep)

    def check(self, layers):
        check_full(layers)

    def plan(self, layers, analyses):
        return {layer.index: full_target(layer) for layer in layers}

    def compress(self, layer, base, target, write, analysis):
        measure = Measure(layer.num_experts, layer.moe.expert.dim)
        for name in layer.shapes:
            kernels = [kernel.astype(np.float32) for kernel in layer.kernels(name)]
            mean = mean_kernel(kernels)
            made = [mean + np.float32(self.keep) * (kernel - mean) for kernel in kernels]
            for expert, (kernel, moved) in enumerate(zip(kernels, made, strict=True)):
                measure.add(expert, kernel, mean, moved - mean)
            write(f"experts/{name}/kernel", np.stack([layer.stored(name, kernel) for kernel in made]))
        return measure.figures(choice=f"keep {self.keep:g}")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """The method, for this file only."""
    monkeypatch.setitem(METHODS, "toy", ToTheMean)


def test_the_command_runs_it(models, out_of, tmp_path):
    said = out_of("compress", models["moe"], tmp_path / "out", "--method", "toy", "--keep", "0.25", "--json")
    before, after = ModelDirectory(models["moe"]), ModelDirectory(tmp_path / "out")
    at = "layers/0/mlp/experts/up/kernel"
    kernels, moved = before.read(at), after.read(at)
    mean = kernels.mean(axis=0)
    np.testing.assert_allclose(moved, mean + 0.25 * (kernels - mean), atol=1e-6)
    assert json.loads(said.splitlines()[0])["choice"] == "keep 0.25"
    report = after.lineage[-1]["measured"]
    assert report["bytes_before"] == report["bytes_after"]
    assert after.lineage[-1]["options"]["method"] == "toy"
    assert np.isfinite(logits_of(load_model(after), np.array([[1, 2, 3]]))).all()


def test_plan_counts_it(models, out_of):
    planned = json.loads(out_of("plan", models["moe"], "--compress", "toy", "--keep", "0.5", "--json"))["compression"]
    moe = ModelDirectory(models["moe"]).config.moe(0)
    assert planned["forms"][0]["layer"]["total"] == layer_bytes(moe, 16, np.dtype("float32")).total


@long
def test_it_takes_part_in_a_sweep(models, out_of, text, tmp_path):
    words = ("--sweep", "--method", "toy", "--text", text, "--seq-len", 16)
    swept = json.loads(out_of("compress", models["one"], tmp_path / "sweep", *words, "--json"))["measured"]
    half, whole = swept["points"]
    assert (half["value"], whole["value"]) == (0.5, 1.0) and half["kept"] == whole["kept"] == 1
    assert half["relative_error"] > whole["relative_error"]


def test_its_options_are_checked():
    for options in ({}, {"keep": 2.0}, {"keep": 0.5, "bits": 4}):
        with pytest.raises(InputError, match="keep|bits"):
            make_method("toy", options)
