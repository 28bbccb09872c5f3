"""How much the loss of a text depends on what MoE layers give: squared gradients, and what they are used for."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.api.compress import calibrate
from moe_jax.commands.cli import main
from moe_jax.compression.calibration import divergences
from moe_jax.compression.calibration.recording import gradients_file, read_layer, record
from moe_jax.compression.calibration.sensitivities import (
    has_gradients,
    measure_sensitivities,
    record_gradients,
    sensitivity_of,
)
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from moe_jax.nn import Block
from tests.support.dense_models import write_model
from tests.support.moe_models import memory_moe
from tests.support.tiers import long


class StoppedError(Exception):
    """As if the process was killed."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two layers, both of experts."""
    made = memory_moe(BankConfig(), BankConfig())
    return ModelDirectory(write_model(tmp_path_factory.mktemp("two") / "model", made.config, made.leaves))


@pytest.fixture(scope="module")
def windows(source):
    ids = np.random.default_rng(0).integers(0, source.config.vocab_size, 5 * 12)
    return ids.reshape(5, 12).astype(np.int32)


@pytest.fixture(scope="module")
def recorded(source, windows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    how = {"mesh": make_mesh({}, jax.devices()[:1]), "batch_size": 2}
    record(source, windows, folder, {"model": "one"}, **how)
    assert not has_gradients(folder, source.config.moe_layers)
    record_gradients(source, windows, folder, **how)
    return folder


def squared_gradients(source, windows, monkeypatch):
    """Of the whole model at once: by layer, of the loss with respect to something added to what the layer gives."""
    model, apply = load_model(source, stacked=False), Block.__call__
    graphdef, state = nnx.split(model)
    config = source.config

    def loss(added):
        after = iter(added)

        def apply_and_add(block, *arguments, **options):
            y, *rest = apply(block, *arguments, **options)
            return (y + next(after), *rest)

        monkeypatch.setattr(Block, "__call__", apply_and_add)
        logits = nnx.merge(graphdef, state)(jnp.asarray(windows)).logits[:, :-1]
        monkeypatch.setattr(Block, "__call__", apply)
        likely = jnp.take_along_axis(jax.nn.log_softmax(logits), windows[:, 1:, None], 2)
        return -jnp.sum(likely)

    nothing = [jnp.zeros((*windows.shape, config.d_model)) for _ in range(config.num_layers)]
    return [np.square(np.asarray(g)).sum(axis=-1).reshape(-1) for g in jax.jit(jax.grad(loss))(nothing)]


def test_are_those_of_the_whole_model(source, windows, recorded, monkeypatch):
    whole = squared_gradients(source, windows, monkeypatch)
    for layer in source.config.moe_layers:
        found = read_layer(recorded, layer, gradients=True).rows.gradients
        # Activations are rounded to bfloat16 between layers.
        np.testing.assert_allclose(found, whole[layer] / whole[layer].mean(), rtol=0.06, atol=0.02)
        assert found.dtype == np.float32 and np.isclose(found.mean(), 1, rtol=1e-5) and found.std() > 0.2
        # Without asking, nothing is different.
        assert read_layer(recorded, layer).rows.gradients is None
    assert all(path.is_file() for path in recorded.iterdir())  # nothing is left of what the pass kept on its way


@long
def test_goes_on_where_it_was_stopped(source, windows, recorded, tmp_path):
    how = {"mesh": make_mesh({}, jax.devices()[:1]), "batch_size": 2}
    steps = []
    record_gradients(source, windows, tmp_path, **how, progress=lambda what, done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == list(range(steps[0][1] + 1))
    for stop in range(len(steps) - 1):

        def progress(what, done, total, stop=stop):
            if done == stop:
                raise StoppedError

        folder = tmp_path / str(stop)
        folder.mkdir()
        with pytest.raises(StoppedError):
            record_gradients(source, windows, folder, **how, progress=progress)
        assert not has_gradients(folder, source.config.moe_layers)
        told = []
        record_gradients(
            source, windows, folder, **how, progress=lambda what, done, total, told=told: told.append(done)
        )
        assert told == list(range(stop, len(steps)))
        assert {file.name for file in folder.iterdir()} == {f"{i}.gradients.npy" for i in source.config.moe_layers}
        for layer in source.config.moe_layers:
            assert gradients_file(folder, layer).read_bytes() == gradients_file(recorded, layer).read_bytes()


@long
def test_over_a_mesh_they_are_the_same(source, windows, recorded, tmp_path):
    record_gradients(source, windows, tmp_path, mesh=make_mesh({"data": 4, "expert": 2}), batch_size=3)
    for layer in source.config.moe_layers:
        one, many = (np.load(gradients_file(folder, layer)) for folder in (recorded, tmp_path))
        np.testing.assert_allclose(one, many, rtol=0.06, atol=0.02)


def test_what_has_no_gradients(source, windows, tmp_path, monkeypatch):
    how = {"mesh": make_mesh({}, jax.devices()[:1])}
    with pytest.raises(InputError, match="nothing follows"):
        record_gradients(source, windows[:, :1], tmp_path, **how)

    class Spoilt(ModelDirectory):
        def read(self, path):
            leaf = super().read(path)
            return np.full_like(leaf, self.value) if path == "final_norm/scale" else leaf

    for value, message in ((0.0, "does not depend on what layer"), (np.nan, "are not finite; mend the model")):
        spoilt = Spoilt(source.path)
        spoilt.value = value
        (tmp_path / str(value)).mkdir()
        with pytest.raises(InputError, match=message):
            record_gradients(spoilt, windows, tmp_path / str(value), **how)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(InputError, match=r"60 tokens take .* where 1 B are free"):
        record_gradients(source, windows, tmp_path, **how)


def test_sensitivities_are_not_begun_without_the_memory(source, windows, monkeypatch):
    """Twice the inputs of a layer, float32, for the model and for each matrix of each layer."""
    needed = 2 * 4 * windows.size * source.config.d_model * (1 + 2 * 3)

    def begins(*_, **how):
        raise StoppedError

    monkeypatch.setattr(divergences, "embedded_rows", begins)
    how = {"mesh": make_mesh({}, jax.devices()[:1])}
    for free, expected in ((needed, StoppedError), (None, StoppedError), (needed - 1, InputError)):
        monkeypatch.setattr(divergences, "available_memory", lambda free=free: free)
        with pytest.raises(expected):
            measure_sensitivities(source, windows, {}.__getitem__, **how)


def test_a_divergence_lost_in_rounding_still_lets_errors_count():
    assert sensitivity_of(0.01, 0.04) == 0.25
    assert sensitivity_of(0.0, 0.01) > sensitivity_of(0.0, 0.04) > 0
    assert 0 < sensitivity_of(0.0, 0.0) <= 1  # nothing is known


@long
def test_a_recording_serves_with_and_without_them(models, text, tmp_path):
    source = ModelDirectory(models["one"])
    options = {"seq_len": 16, "samples": 4, "sensitivities": True, "place": (tmp_path / "kept").joinpath}
    plain, weighted, again = (calibrate(source, text, gradients=asked, **options) for asked in (False, True, False))
    assert plain.folder == weighted.folder == again.folder
    for layer in source.config.moe_layers:
        one, other, third = (of.layers[layer] for of in (plain, weighted, again))
        assert one.rows.gradients is None and third.rows.gradients is None
        assert len(other.rows.gradients) == len(one.rows.inputs)
        assert one.sensitivities == third.sensitivities != other.sensitivities


def test_the_command_counts_tokens_by_them(models, text, tmp_path, capsys):
    words = ["compress", str(models["one"]), "--method", "quantize", "--bits", "2"]
    asked = ["--calibrate", str(text), "--seq-len", "16", "--samples", "4", "--calibration-dir", str(tmp_path / "kept")]
    assert main([words[0], words[1], str(tmp_path / "no"), *words[2:], "--gradients"]) == 2
    assert "--gradients: only with --calibrate" in capsys.readouterr().err and not (tmp_path / "no").exists()
    found = {}
    for name, more in (("plain", []), ("weighted", ["--gradients"])):
        assert main([words[0], words[1], str(tmp_path / name), *words[2:], *asked, *more]) == 0
        found[name] = ModelDirectory(tmp_path / name)
    path = "layers/0/mlp/experts/delta/up/codes"
    assert not np.array_equal(*(of.read(path) for of in found.values()))
    lineage = [of.lineage[-1]["options"].get("gradients") for of in found.values()]
    assert lineage == [None, True]
    # The same from Python.
    options = {"method": "quantize", "bits": 2, "gradients": True}
    made = moe_jax.compress(
        models["one"], calibrate=text, seq_len=16, samples=4, calibration_dir=tmp_path / "kept", **options
    )
    np.testing.assert_array_equal(made.source.read(path), found["weighted"].read(path))
    with pytest.raises(InputError, match="gradients.*calibrate"):
        moe_jax.compress(models["one"], **options)
