"""A calibration on conversations, of which some show pictures: the model's own eye, and padding that counts nowhere."""

import dataclasses
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import moe_jax
from moe_jax.api.compress import calibrate
from moe_jax.commands.cli import main
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.recording import read_layer, record
from moe_jax.compression.calibration.sensitivities import measure_sensitivities, record_gradients
from moe_jax.core.errors import InputError
from moe_jax.data.chat_template import template_file
from moe_jax.data.tokenizer import Pair
from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts.bank import KernelBank
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from moe_jax.nn import Block
from moe_jax.nn.moe import RouterSums, stats_per_layer
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.moe_models import MemorySource, moe_config, trained_leaves
from tests.support.seeing_models import FEATURES, picture_batch, seeing, tower_config
from tests.support.tiers import long, one_in

LENGTHS, PLACES = (24, 15, 20, 9), ((2, 12), (), (5,), ())
"""Of four rows: the tokens, and where their pictures begin."""
KEY = {"model": "one"}


class StoppedError(Exception):
    """As if the process was killed."""


def config_of(**moe):
    # Hidden states of two layers are joined, of which one is the tower's last, behind its norm.
    tower = dataclasses.replace(tower_config(), final_norm=True)
    dense = dataclasses.replace(dense_config(num_layers=2), vocab_size=264, bos_id=BOS, eos_ids=(EOS,))
    return seeing(moe_config(dense, BankConfig(), BankConfig(), **moe), tower=tower, features=(1, -1))


def source_of(config):
    dense = dataclasses.replace(config, layers=tuple(
        dataclasses.replace(layer, mlp=layer.mlp.expert) for layer in config.layers
    ))  # fmt: skip
    return MemorySource(config, trained_leaves(config, random_leaves(dense)))


def rows_of(config):
    batch = picture_batch(config, max(LENGTHS), *PLACES)
    documents = []
    for row, (length, places) in enumerate(zip(LENGTHS, PLACES, strict=True)):
        pixels, part = batch["pixels"][row, : len(places)], slice(0, length)
        seen = {"slots": batch["slots"][row, part], "pictures": len(places), "pixels": lambda pixels=pixels: pixels}
        arrays = (batch[name][row, part] for name in ("tokens", "targets", "weights"))
        documents.append(Pair(*arrays, **(seen if places else {})))
    return CalibrationRows.of_documents(documents), batch


@pytest.fixture(scope="module")
def source():
    return source_of(config_of())


@pytest.fixture(scope="module")
def recorded(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    record(source, rows_of(source.config)[0], folder, KEY, mesh=make_mesh({}, jax.devices()[:1]), batch_size=4)
    return folder


def of_decoder(source, rows, batch, monkeypatch):
    """What the decoder itself gives its banks, and the statistics of its routers, by layer; with padding."""
    given, apply = [], KernelBank.__call__

    def note(bank, x, routing, key=None):
        jax.debug.callback(lambda *arrays: given.append([np.asarray(one) for one in arrays]), x, *routing, ordered=True)
        return apply(bank, x, routing, key)

    monkeypatch.setattr(KernelBank, "__call__", note)
    out = load_model(source)(
        rows.tokens, pixels=batch["pixels"], slots=rows.slots, segment_ids=rows.valid.astype(np.int32)
    )
    jax.effects_barrier()
    return given, stats_per_layer(source.config, out.router)


@one_in(2, first=1)
@pytest.mark.parametrize("moe", [{}, {"capacity_factor": 0.6}], ids=["dropless", "capacity"])
def test_records_what_the_decoder_gives_its_banks(source, recorded, moe, tmp_path, monkeypatch):
    if moe:
        source, recorded = source_of(config_of(**moe)), tmp_path
        mesh = make_mesh({}, jax.devices()[:1])
        record(source, rows_of(source.config)[0], recorded, KEY, mesh=mesh, batch_size=4)
    rows, batch = rows_of(source.config)
    given, stats = of_decoder(source, rows, batch, monkeypatch)
    valid = rows.valid.reshape(-1)
    assert rows.count == sum(LENGTHS) == valid.sum() and (rows.slots > 0).sum() == 3 * FEATURES
    for layer in source.config.moe_layers:
        found, (x, experts, weights) = read_layer(recorded, layer), given[layer]
        np.testing.assert_allclose(found.rows.inputs.astype(np.float32), x[valid], rtol=2.0**-7, atol=1e-5)
        np.testing.assert_array_equal(found.rows.experts, experts[valid])
        np.testing.assert_allclose(found.rows.weights, weights[valid], atol=1e-5)
        assert (found.rows.experts < 0).any() == bool(moe)
        sums = RouterSums()
        sums.add(stats[layer], rows.count)
        for one, other in zip(found.statistics, sums.statistics(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_rows_alone_are_as_beside_others(source, recorded, tmp_path):
    """One row at a time, with its own pictures: none sees another's."""
    record(source, rows_of(source.config)[0], tmp_path, KEY, mesh=make_mesh({}, jax.devices()[:1]), batch_size=1)
    for layer in source.config.moe_layers:
        one, other = read_layer(tmp_path, layer), read_layer(recorded, layer)
        np.testing.assert_array_equal(one.rows.experts, other.rows.experts)
        np.testing.assert_allclose(
            one.rows.inputs.astype(np.float32), other.rows.inputs.astype(np.float32), rtol=2.0**-7, atol=1e-5
        )
        for mean, of_all in zip(one.statistics, other.statistics, strict=True):
            np.testing.assert_allclose(mean, of_all, atol=1e-5)


@long
def test_over_a_mesh_it_is_the_same(source, recorded, tmp_path):
    mesh = make_mesh({"data": 4, "expert": 2})
    record(source, rows_of(source.config)[0], tmp_path, KEY, mesh=mesh, batch_size=3)
    for layer in source.config.moe_layers:
        one, many = read_layer(recorded, layer), read_layer(tmp_path, layer)
        np.testing.assert_allclose(
            one.rows.inputs.astype(np.float32), many.rows.inputs.astype(np.float32), rtol=2.0**-7, atol=1e-5
        )
        np.testing.assert_array_equal(one.rows.experts, many.rows.experts)
        np.testing.assert_allclose(one.statistics.similarity, many.statistics.similarity, atol=1e-5)


@one_in(2)
@pytest.mark.parametrize("what", ["looking at pictures", "calibrating"])
def test_goes_on_where_it_was_stopped(what, source, recorded, tmp_path):
    def stop(which, done, total):
        if (which, done) == (what, 1):
            raise StoppedError

    rows, _ = rows_of(source.config)
    how = {"mesh": make_mesh({}, jax.devices()[:1]), "batch_size": 4}
    with pytest.raises(StoppedError):
        record(source, rows, tmp_path, KEY, **how, progress=stop)
    assert not (tmp_path / "calibration.json").exists()
    read = []

    class Counting(MemorySource):
        def read(self, path):
            read.append(path)
            return super().read(path)

    record(Counting(source.config, source.leaves), rows, tmp_path, KEY, **how)
    # After the eye is done, nobody looks again.
    assert any(path.startswith("vision/") for path in read) == (what != "calibrating")
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in recorded.iterdir()}
    for layer in source.config.moe_layers:
        one, other = read_layer(tmp_path, layer), read_layer(recorded, layer)
        assert one.rows.inputs.tobytes() == other.rows.inputs.tobytes()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one.statistics, other.statistics, strict=True))


def squared_gradients(source, rows, batch):
    """Of the decoder as a whole: by layer, of the loss with respect to something added to what the layer gives."""
    model = load_model(source, stacked=False)
    graphdef, state = nnx.split(model)
    config = source.config
    given = {"pixels": batch["pixels"], "slots": rows.slots, "segment_ids": rows.valid.astype(np.int32)}

    @jax.jit
    @jax.grad
    def of_loss(added):
        after, apply = iter(added), Block.__call__

        def apply_and_add(block, x, *rest, **options):
            y, *more = apply(block, x, *rest, **options)
            # The tower's layers are blocks, too.
            return (y + next(after) if y.shape == rows.tokens.shape + (config.d_model,) else y, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Block, "__call__", apply_and_add)
            model = nnx.merge(graphdef, state)
            losses = model.token_losses(model.activations(rows.tokens, **given).x, rows.targets)
        return jnp.sum(losses * rows.weights)

    nothing = [jnp.zeros((*rows.tokens.shape, config.d_model)) for _ in range(config.num_layers)]
    return [np.square(np.asarray(g)).sum(axis=-1)[rows.valid] for g in of_loss(nothing)]


@long
def test_the_loss_is_that_of_answers(source, recorded):
    rows, batch = rows_of(source.config)
    how = {"mesh": make_mesh({}, jax.devices()[:1]), "batch_size": 4}
    record_gradients(source, rows, recorded, **how)
    whole = squared_gradients(source, rows, batch)
    assert rows.predicting.sum() == rows.count - 3 * FEATURES and not (rows.predicting & ~rows.valid).any()
    for layer in source.config.moe_layers:
        found = read_layer(recorded, layer, gradients=True).rows.gradients
        # Activations are rounded to bfloat16 between layers.
        np.testing.assert_allclose(found, whole[layer] / whole[layer].mean(), rtol=0.06, atol=0.02)
        assert found.shape == (rows.count,) and found.mean() == pytest.approx(1, rel=1e-5)
    # At the last layer, on what is said for a token nothing depends but its own loss.
    weights = rows.weights[rows.valid]
    assert (found[weights == 0] == 0).all() and (found[weights > 0] > 0).all() and (weights == 0).any()


@long
def test_sensitivities_are_measured_of_rows_with_pictures(source, recorded):
    rows, how = rows_of(source.config)[0], {"mesh": make_mesh({}, jax.devices()[:1]), "batch_size": 4}
    measured = measure_sensitivities(source, rows, lambda layer: read_layer(recorded, layer), **how)
    blank = dataclasses.replace(rows, pixels=tuple(lambda own=own: np.zeros_like(own()) for own in rows.pixels))
    other = measure_sensitivities(source, blank, lambda layer: read_layer(recorded, layer), **how)
    assert measured != other
    assert all(0 < one < np.inf for layer in measured.values() for one in layer.values())


def test_windows_as_rows_are_what_they_were():
    windows = np.arange(12, dtype=np.int32).reshape(3, 4)
    rows = CalibrationRows.of_windows(windows)
    assert rows.count == 12 and rows.num_pictures == 0 and rows.predicting.all()
    assert rows.weights.tolist() == [[1, 1, 1, 0]] * 3 and rows.targets[0, :3].tolist() == [1, 2, 3]
    other = dataclasses.replace(rows, valid=windows < 11)
    assert len({rows.digest(), other.digest(), rows.first(2).digest()}) == 3


def png(number: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (15, 20, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def data(source, tmp_path_factory):
    """A folder with the model, one without an eye, pictures, and conversations with one, two and none of them."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer, template = byte_tokenizer(folder / "tokenizer.json"), folder / "chat_template.jinja"
    template.write_text(template_file("llava-plain").read_text())
    files = (tokenizer, template)
    write_model(folder / "model", source.config, source.leaves, files)
    blind = {path: leaf for path, leaf in source.leaves.items() if not path.startswith("vision/")}
    write_model(folder / "blind", dataclasses.replace(source.config, vision=None), blind, files)
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(number))
    rows = [
        {"image": "0.png", "conversations": said("<image>\nq", "a red one")},
        {"images": ["1.png", "2.png"], "conversations": said("<image><image>\nq", "two of them")},
        {"conversations": said("q", "no picture here")},
        {"text": "A text that is no conversation, and longer than a row of the calibration is."},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("A text. " * 20)
    (folder / "bad.jsonl").write_text(json.dumps(rows[0] | {"image": "none.png"}) + "\n")
    return folder


def said(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def test_files_of_rows(data):
    model = ModelDirectory(data / "model")
    made = calibrate(model, data / "rows.jsonl", seq_len=40, place=(data / "kept").joinpath)
    first = made.layers[0]
    # Captions as llava-plain writes them, without their line ends, and a text as a document, without its end.
    lengths = [FEATURES + 9, 2 * FEATURES + 11, 15, 76]
    assert len(first.rows.inputs) == sum(lengths)
    again = calibrate(model, data / "rows.jsonl", seq_len=40, place=(data / "kept").joinpath)
    assert again.folder == made.folder
    before = (data / "0.png").read_bytes()
    (data / "0.png").write_bytes(png(9))
    other = calibrate(model, data / "rows.jsonl", seq_len=40, place=(data / "kept").joinpath)
    (data / "0.png").write_bytes(before)
    assert other.folder != made.folder
    (data / "elsewhere").mkdir()
    shutil.copy(data / "rows.jsonl", data / "elsewhere")
    moved = data / "elsewhere" / "rows.jsonl"
    same = calibrate(model, moved, seq_len=40, image_folder=data, place=(data / "kept").joinpath)
    assert same.folder == made.folder
    with pytest.raises(InputError, match="0.png"):
        calibrate(model, moved, seq_len=40)
    with pytest.raises(InputError, match="5 rows of"):
        calibrate(model, data / "rows.jsonl", seq_len=40, samples=6)


@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("blind", "rows.jsonl", "has no eye"),
        ("model", "bad.jsonl", "none.png"),
        ("model", "absent.jsonl", "absent.jsonl"),
        ("model", "text.txt", "image_folder is for"),
    ],
)
def test_mistakes_are_a_line(model, file, message, data, tmp_path, capsys):
    words = ["--method", "quantize", "--bits", "4", "--calibrate", str(data / file), "--seq-len", "40"]
    words += ["--image-folder", str(data)]
    assert main(["compress", str(data / model), str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@long
def test_a_model_that_sees_is_put_in_codes_by_rows_with_pictures(data, source):
    """Attention, FFNs, embedding and head are; what sees stays as it is."""
    rows, batch = rows_of(source.config)
    whole = ModelDirectory(data / "model")
    options = {"method": "quantize", "bits": 8, "group_size": 8, "of": "model"}
    ours = moe_jax.compress(data / "model", None, calibrate=data / "rows.jsonl", seq_len=40, **options)
    sees = [path for path in whole.specs() if path.startswith("vision/")]
    assert sees and all(np.array_equal(whole.read(path), ours.source.read(path)) for path in sees)
    assert {part.part for part in ours.report.parts} == {"embedding", "attention", "head"}
    assert ours.report.losses is not None and "embed/coded/codes" in ours.source.specs()

    def said(model):
        out = model(rows.tokens, pixels=batch["pixels"], slots=rows.slots, segment_ids=rows.valid.astype(np.int32))
        return np.asarray(out.logits)[rows.valid]

    before, after = said(load_model(whole)), said(ours.decoder)
    # Of most tokens: some change their experts where these are nearly as good, and then much.
    assert np.median(np.square(after - before).mean(axis=-1)) < 0.01 * before.var()
