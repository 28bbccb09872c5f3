"""Cosines between experts and their base, against the definition."""

import dataclasses
import pathlib

import numpy as np
import pytest

from moe_jax.core.errors import InputError
from moe_jax.figures import comparable_layers, measure_similarity, similarity
from moe_jax.models import AdapterConfig, BankConfig, FFNConfig, LoRAConfig
from tests.support.figure_models import BANKS, EXPERTS, experts_of, moe_config, write_model

MATRICES = ("gate", "up", "down")


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.reshape(-1), b.reshape(-1)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A dense layer, and one of every kind of bank."""
    return write_model(tmp_path_factory.mktemp("similarity") / "all", moe_config(None, *BANKS.values()))


@pytest.mark.parametrize(("layer", "kind"), list(enumerate(BANKS, start=1)))
def test_cosines_are_those_of_the_definition(layer, kind, model, monkeypatch):
    monkeypatch.setattr(similarity, "_BLOCK", 5 * 40 * 3)  # several blocks, the last one smaller
    measured = measure_similarity(model, layer)
    assert measured.base == ("mean of the experts" if kind == "full" else "shared base")
    experts = {name: experts_of(model, layer, name) for name in MATRICES}
    bases = {
        name: experts[name].mean(axis=0)
        if kind == "full"
        else model.read(f"layers/{layer}/mlp/experts/base/{name}/kernel").astype(np.float64)
        for name in MATRICES
    }
    for name in MATRICES:
        expected = [cosine(expert, bases[name]) for expert in experts[name]]
        np.testing.assert_allclose(measured.to_base[name], expected, atol=1e-6)
    whole = np.concatenate([experts[name].reshape(EXPERTS, -1) for name in MATRICES], axis=1)
    base = np.concatenate([bases[name].reshape(-1) for name in MATRICES])
    np.testing.assert_allclose(measured.whole_to_base, [cosine(expert, base) for expert in whole], atol=1e-6)
    expected = [[cosine(one, other) for other in whole] for one in whole]
    np.testing.assert_allclose(measured.between, expected, atol=1e-6)
    assert np.ptp(expected) > 0.01 and np.ptp(measured.whole_to_base) > 1e-3  # the model is one that could be missed


def test_layers_without_whole_experts_are_not_compared():
    adapters = BankConfig(kind="adapter", adapter=AdapterConfig(rank=2))
    config = moe_config(None, *BANKS.values(), adapters)
    assert comparable_layers(config) == [1, 2, 3, 4]
    for tuned in (FFNConfig(dim=40, lora=LoRAConfig(rank=2, targets=("up",))), FFNConfig(dim=40, nf4=True)):
        mlp = dataclasses.replace(config.moe(1), expert=tuned)
        layers = (config.layers[0], dataclasses.replace(config.layers[1], mlp=mlp), *config.layers[2:])
        assert comparable_layers(dataclasses.replace(config, layers=layers)) == [2, 3, 4]


def test_only_experts_are_read_and_one_leaf_at_a_time(model, monkeypatch):
    paths, read = [], type(model).read

    def noted(self, path):
        paths.append(path)
        return read(self, path)

    monkeypatch.setattr(type(model), "read", noted)
    measure_similarity(model, 1)
    assert paths == [f"layers/1/mlp/experts/{name}/kernel" for name in MATRICES]


def test_cosines_next_to_one_keep_their_digits():
    random = np.random.default_rng(0)
    base = random.normal(size=(64, 64)).astype(np.float32)
    near = (base.astype(np.float64) * (1 + 1e-4 * random.normal(size=base.shape))).astype(np.float32)
    gram = similarity.gram_matrix([base, near])
    found = 1 - gram[0, 1] / np.sqrt(gram[0, 0] * gram[1, 1])
    expected = 1 - cosine(base.astype(np.float64), near.astype(np.float64))
    assert 1e-9 < expected < 1e-8 and abs(found - expected) < 1e-3 * expected


def test_the_universal_ffn_is_the_last_expert(tmp_path: pathlib.Path):
    config = moe_config(BANKS["low-rank"], universal="coder", extended=True)
    measured = measure_similarity(write_model(tmp_path / "extended", config), 0)
    assert measured.universal and measured.between.shape == (EXPERTS + 1, EXPERTS + 1)
    assert len(measured.whole_to_base) == EXPERTS + 1


def test_experts_of_nothing_but_zeros_have_a_cosine():
    assert similarity._cosines_to_base(np.zeros((4, 4)), has_base=False).tolist() == [1.0] * 4


def test_weights_that_are_not_finite_are_named(model, monkeypatch):
    read = type(model).read
    monkeypatch.setattr(type(model), "read", lambda self, path: read(self, path) * np.nan)
    with pytest.raises(InputError, match="layer 1 have entries"):
        measure_similarity(model, 1)
