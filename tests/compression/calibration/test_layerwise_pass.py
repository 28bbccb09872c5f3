"""The calibration pass: what it keeps of a model that runs over a text, and what it does when it is stopped."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.api.compress import calibrate
from moe_jax.checks.streamed_model import StreamedModel
from moe_jax.commands.cli import main
from moe_jax.compression.calibration.recording import (
    DEFAULT_SAMPLES,
    read_layer,
    read_sensitivities,
    record,
    sample_windows,
    write_sensitivities,
)
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.files.staging import lock_directory
from moe_jax.functional.routing.route import route
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.tiers import one_in

KEY = {"model": "one"}


class StoppedError(Exception):
    """As if the process was killed."""


@pytest.fixture(scope="module")
def source(models):
    return ModelDirectory(models["moe"])


@pytest.fixture(scope="module")
def windows(source):
    ids = np.random.default_rng(0).integers(0, source.config.vocab_size, 5 * 12)
    return ids.reshape(5, 12).astype(np.int32)


@pytest.fixture(scope="module")
def recording(source, windows, tmp_path_factory):
    """The folder, and what was told on the way."""
    folder, told = tmp_path_factory.mktemp("recorded"), []
    how = {"mesh": make_mesh({}, jax.devices()[:1]), "batch_size": 2}
    record(source, windows, folder, KEY, **how, progress=lambda *step: told.append(step))
    return folder, told


@pytest.fixture(scope="module")
def recorded(recording):
    return recording[0]


def test_layers_are_counted_up_to_the_last_with_experts(source, recording):
    count = max(source.config.moe_layers) + 1
    assert recording[1] == [("calibrating", done, count) for done in range(count + 1)]


def test_keeps_what_every_bank_is_given(source, windows, recorded):
    """Inputs as another program sees them, and the routing that follows from them."""
    seen = {}
    model = StreamedModel(source.config, source.specs(), windows, with_logits=False)
    model.mlp_inputs(source.read, lambda layer, x: seen.setdefault(layer, np.asarray(x).reshape(-1, x.shape[-1])))
    for layer in source.config.moe_layers:
        moe, found = source.config.moe(layer), read_layer(recorded, layer)
        np.testing.assert_allclose(found.rows.inputs.astype(np.float32), seen[layer], rtol=2.0**-7, atol=1e-5)
        logits = jnp.asarray(seen[layer]) @ source.read(f"layers/{layer}/mlp/router/kernel")
        routing, stats = jax.jit(route, static_argnums=(1, 2))(logits, moe.top_k, moe.weighting)
        np.testing.assert_array_equal(found.rows.experts, routing.experts)
        np.testing.assert_allclose(found.rows.weights, routing.weights, atol=1e-5)
        np.testing.assert_allclose(found.statistics.usage, stats.load, atol=1e-6)
        np.testing.assert_allclose(found.statistics.score, stats.probability, atol=1e-5)


def test_leaves_nothing_else_behind(source, recorded):
    names = {"calibration.json", *(f"{i}{end}" for i in source.config.moe_layers for end in (".npz", ".inputs.npy"))}
    assert {file.name for file in recorded.iterdir()} == names


@one_in(2)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_goes_on_where_it_was_stopped(layer, source, windows, recorded, tmp_path):
    def stop(what, done, total):
        if done == layer:
            raise StoppedError

    again = {"mesh": make_mesh({}, jax.devices()[:1]), "batch_size": 2}
    with pytest.raises(StoppedError):
        record(source, windows, tmp_path / "new", KEY, **again, progress=stop)
    assert not (tmp_path / "new" / "calibration.json").exists()
    read = []

    class Counting(ModelDirectory):
        def read(self, path):
            read.append(path)
            return super().read(path)

    record(Counting(source.path), windows, tmp_path / "new", KEY, **again)
    assert not any(path.startswith(tuple(f"layers/{i}/" for i in range(layer))) for path in read)
    for file in recorded.glob("*.npz"):  # whose members carry the time
        with np.load(file) as one, np.load(tmp_path / "new" / file.name) as other:
            assert all(one[name].tobytes() == other[name].tobytes() for name in one.files)
    for file in recorded.iterdir():
        assert file.read_bytes() == (tmp_path / "new" / file.name).read_bytes() or file.suffix == ".npz"


def test_over_a_mesh_it_is_the_same(source, windows, recorded, tmp_path):
    record(source, windows, tmp_path, KEY, mesh=make_mesh({"data": 4, "expert": 2}), batch_size=3)
    for layer in source.config.moe_layers:
        one, many = read_layer(recorded, layer), read_layer(tmp_path, layer)
        np.testing.assert_allclose(
            one.rows.inputs.astype(np.float32), many.rows.inputs.astype(np.float32), rtol=2.0**-7, atol=1e-5
        )
        np.testing.assert_array_equal(one.rows.experts, many.rows.experts)
        np.testing.assert_allclose(one.statistics.similarity, many.statistics.similarity, atol=1e-5)


def test_activations_of_any_batch_that_are_not_finite_are_an_error(source, windows, tmp_path):
    class Spoilt(ModelDirectory):
        def read(self, path):
            leaf = super().read(path)
            if path == "embed/embedding":
                leaf = leaf.copy()
                leaf[windows[0, 3]] = np.nan
            return leaf

    with pytest.raises(InputError, match="layer 0 gives is not"):
        record(Spoilt(source.path), windows, tmp_path, KEY, mesh=make_mesh({}, jax.devices()[:1]), batch_size=2)


def test_windows_are_drawn_once_each_and_in_order():
    ids = np.arange(1000)
    windows = sample_windows(ids, seq_len=10, samples=7, seed=3)
    assert windows.shape == (7, 10) and (np.diff(windows[:, 0]) > 0).all() and (windows[:, 0] % 10 == 0).all()
    assert (np.diff(windows, axis=1) == 1).all()
    assert not np.array_equal(windows, sample_windows(ids, seq_len=10, samples=7, seed=4))
    assert sample_windows(ids, seq_len=10).shape == (100, 10)
    assert sample_windows(np.arange(10 * DEFAULT_SAMPLES + 55), seq_len=10).shape == (DEFAULT_SAMPLES, 10)
    assert sample_windows(ids, seq_len=2000).shape == (1, 1000)
    with pytest.raises(InputError, match="1000 tokens, which are 100 windows of 10"):
        sample_windows(ids, seq_len=10, samples=101)


def test_a_recording_is_found_again_and_another_is_not_taken(models, source, text, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    first = calibrate(source, text, seq_len=16, samples=4, place=kept.joinpath)
    made = {file: file.stat().st_mtime_ns for file in kept.rglob("*.npy")}
    second = calibrate(source, text, seq_len=16, samples=4, place=kept.joinpath)
    assert made == {file: file.stat().st_mtime_ns for file in kept.rglob("*.npy")}
    assert first.folder == second.folder and len(made) == len(source.config.moe_layers)
    assert calibrate(source, text, seq_len=16, samples=4, seed=1, place=kept.joinpath).folder != first.folder
    with pytest.raises(InputError, match="calibration of something"):
        calibrate(source, text, seq_len=16, samples=3, place=lambda name: first.folder)
    next(iter(made)).write_bytes(b"nonsense")
    with pytest.raises(InputError, match="is damaged"):
        calibrate(source, text, seq_len=16, samples=4, place=kept.joinpath)


def test_what_cannot_be_calibrated(models, text, source, windows, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="model is dense"):
        calibrate(ModelDirectory(models["dense"]), text)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(InputError, match=r"60 tokens takes .* where 1 B are free"):
        record(source, windows, tmp_path, KEY, mesh=make_mesh({}, jax.devices()[:1]))


def test_sensitivities_are_read_as_they_were_written_or_damaged(tmp_path):
    found = {0: {"up": 0.5, "down": 1e-9}, 12: {"up": 3.0}}
    assert read_sensitivities(tmp_path) is None
    write_sensitivities(tmp_path, found)
    assert read_sensitivities(tmp_path) == found and read_sensitivities(tmp_path, gradients=True) is None
    write_sensitivities(tmp_path, {3: {}}, gradients=True)
    assert read_sensitivities(tmp_path) == found and read_sensitivities(tmp_path, gradients=True) == {3: {}}
    for content in ("[1]", '{"0": 1}', '{"zero": {}}', '{"0": {"up": "much"}}', '{"0": {"up": null}}'):
        for file in tmp_path.iterdir():
            file.write_text(content)
        with pytest.raises(InputError, match="is damaged .* remove it"):
            read_sensitivities(tmp_path)


def test_another_command_on_the_same_text_has_to_wait(source, text, tmp_path):
    """Both would fill the same files, each with what it had come to."""
    options = {"seq_len": 16, "samples": 4, "place": lambda name: tmp_path / "kept"}
    (tmp_path / "kept").mkdir()
    of_another = lock_directory(tmp_path / "kept", tmp_path)
    with pytest.raises(InputError, match="command is writing"):
        calibrate(source, text, **options)
    os.close(of_another)
    assert calibrate(source, text, **options).folder == tmp_path / "kept"
    of_another = lock_directory(tmp_path / "kept", tmp_path)  # of a recording that is whole, nobody writes more
    assert calibrate(source, text, **options).folder == tmp_path / "kept"
    os.close(of_another)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut short"])
def test_a_damaged_recording_is_said_to_be(content, source, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "copy")
    layer = source.config.moe_layers[0]
    (tmp_path / "copy" / f"{layer}.npz").write_bytes(content)
    with pytest.raises(InputError, match="is damaged"):
        read_layer(tmp_path / "copy", layer)


def test_a_recording_of_two_texts_is_damaged(source, windows, recorded, tmp_path):
    record(source, windows[:2], tmp_path / "other", KEY, mesh=make_mesh({}, jax.devices()[:1]))
    layer = source.config.moe_layers[0]
    shutil.copy(recorded / f"{layer}.npz", tmp_path / "other")
    with pytest.raises(InputError, match="different texts"):
        read_layer(tmp_path / "other", layer)


def test_a_model_that_is_named_by_a_dot_is_recorded_beside_it(models, text, tmp_path, monkeypatch, capsys):
    shutil.copytree(models["one"], tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    calibrated = ("--calibrate", str(text), "--seq-len", "16", "--samples", "2")
    assert main(["compress", ".", str(tmp_path / "out"), "--method", "up", "--keep", "0.5", *calibrated]) == 0
    assert (tmp_path / "model.calibration").is_dir()


@one_in(2, first=1)
@pytest.mark.parametrize("method", [("svd",), ("resmoe", "--residual", "svd")])
def test_matrices_that_are_factored_together_use_a_text(method, models, text, tmp_path, capsys):
    calibrated = ("--calibrate", str(text), "--calibration-dir", str(tmp_path / "recorded"), "--seq-len", "16")
    words = ("--method", *method, "--keep", "0.5")
    made = []
    for out, more in {"plain": (), "calibrated": (*calibrated, "--samples", "2")}.items():
        assert main(["compress", str(models["one"]), str(tmp_path / out), *words, *more]) == 0
        source = ModelDirectory(tmp_path / out)
        path = f"layers/{source.config.moe_layers[0]}/mlp/experts/delta/neurons/factor"
        made.append(np.asarray(source.read(path), np.float32))
        assert ("outputs" in capsys.readouterr().out) == bool(more)
    assert made[0].shape == made[1].shape and np.abs(made[0] - made[1]).max() > 1e-3 * np.abs(made[0]).max()
