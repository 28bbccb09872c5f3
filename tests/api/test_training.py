"""Training on batches in memory, and runs from a recipe."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.training.in_memory_training import read_batch
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.tiers import long

FIVE = dataclasses.replace(dense_config(), vocab_size=5, bos_id=None, eos_ids=())
RECIPE = {"optimizer": {"learning_rate": 1e-2}, "train": {"steps": 3}}


def batch(rows: int = 4, length: int = 9) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (rows, length))


def leaves(model: moe_jax.Model) -> dict[str, bytes]:
    return {path: model.source.read(path).tobytes() for path in model.source.specs()}


def test_training_lowers_the_loss_and_leaves_the_given_model_alone():
    model, records = moe_jax.tiny_model(experts=4), []
    before = leaves(model)
    trained = moe_jax.train(RECIPE, model, itertools.repeat(batch()), on_step=records.append)
    assert [record["step"] for record in records] == [1, 2, 3] and records[0]["tokens"] == 4 * 8
    assert records[2]["loss"] < records[0]["loss"] and records[0]["aux_loss"] > 0
    assert leaves(model) == before
    assert all(one != other for one, other in zip(leaves(trained).values(), before.values(), strict=True))
    entry = trained.lineage[-1]
    assert entry["command"] == "train" and entry["measured"] == {"steps": 3, "loss": records[2]["loss"]}
    assert entry["options"]["optimizer.learning_rate"] == 1e-2 and entry["options"]["train.batch_size"] == 4
    assert "run_dir" not in entry["options"]


def test_the_average_is_what_training_in_memory_returns_unless_it_is_not_to_be_exported():
    def trained(**ema) -> dict[str, bytes]:
        return leaves(moe_jax.train(RECIPE | {"train": {"steps": 2}} | ema, moe_jax.tiny_model(), [batch()] * 2))

    last = trained()
    assert trained(ema={"export": False}) == last
    averaged = trained(ema={})
    assert all(averaged[path] != last[path] for path in last)


@long
def test_rows_and_packed_rows_of_the_same_documents_train_alike():
    """Four documents in four rows, or one after the other in one."""
    documents = batch()
    tokens, targets = documents[:, :-1].reshape(1, -1), documents[:, 1:].reshape(1, -1)
    packed = {"tokens": tokens, "targets": targets, "segment_ids": np.repeat([[1, 2, 3, 4]], 8, axis=1)}
    ends = [moe_jax.train(RECIPE, moe_jax.tiny_model(), [given]) for given in (documents, packed)]
    for path in ends[0].source.specs():
        assert np.allclose(ends[0].source.read(path), ends[1].source.read(path), atol=1e-5), path


def test_what_a_batch_leaves_out_is_filled_in():
    made = read_batch({"tokens": [[1, 2, 3, 0]], "targets": [[2, 3, 4, 0]], "segment_ids": [[1, 1, 2, 0]]}, FIVE)
    assert made["positions"].tolist() == [[0, 1, 0, 0]] and made["weights"].tolist() == [[1, 1, 1, 0]]
    assert {array.dtype for name, array in made.items() if name != "weights"} == {np.dtype(np.int32)}
    rows = read_batch([[1, 2, 3]], FIVE)
    assert rows["tokens"].tolist() == [[1, 2]] and rows["targets"].tolist() == [[2, 3]]
    assert rows["segment_ids"].tolist() == [[1, 1]] and rows["positions"].tolist() == [[0, 1]]


def test_adapters_are_trained_and_their_base_is_not(tmp_path):
    base = moe_jax.save(moe_jax.tiny_model(), tmp_path / "base")
    tuned = moe_jax.adapt(base, method="lora", adapter="lora:2", targets="q", step0_check=False)
    trained = moe_jax.train(RECIPE, tuned, [batch()] * 2)
    was, now = leaves(tuned), leaves(trained)
    assert {path for path in was if was[path] != now[path]} == {path for path in was if "/lora/" in path}
    assert trained.lineage[-1]["measured"]["steps"] == 2
    saved = moe_jax.save(trained, tmp_path / "trained")
    assert (saved / "base.json").is_file() and leaves(moe_jax.load(saved)) == now


@long
def test_a_model_over_devices_is_trained_on_them():
    alone = moe_jax.train(RECIPE, moe_jax.tiny_model(), [batch()] * 2)
    loaded = moe_jax.train(RECIPE, moe_jax.load(moe_jax.tiny_model(), mesh={"fsdp": 4, "tensor": 2}), [batch()] * 2)
    asked = moe_jax.train(RECIPE | {"mesh": {"fsdp": 4, "tensor": 2}}, moe_jax.tiny_model(), [batch()] * 2)
    assert alone.mesh.size == 1 and loaded.mesh.size == asked.mesh.size == len(jax.devices()) == 8
    assert leaves(loaded) == leaves(asked)
    for path in alone.source.specs():
        assert np.allclose(alone.source.read(path), asked.source.read(path), atol=1e-4), path


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "are no batches"),
        ([batch(), batch(2)], "batch 2 has 2 rows, expected train.batch_size = 4"),
        ([batch()[0]], r"batch of shape \(9,\)"),
        ([batch() + 60], "vocabulary has 64"),
        ([batch() / 2], "dtype float64, expected integers"),
        ([{"tokens": batch()}], "batch of tokens"),
        ([{"tokens": batch(), "targets": batch()[:, 1:]}], r"batch has shape \(4, 8\)"),
    ],
)
def test_batches_that_cannot_be_trained_on(given, message):
    with pytest.raises(InputError, match=message):
        moe_jax.train(RECIPE, moe_jax.tiny_model(), given)


def test_recipes_and_arguments_that_do_not_go_together(tmp_path):
    model = moe_jax.tiny_model()
    with pytest.raises(InputError, match="batches go together"):
        moe_jax.train(RECIPE, model)
    with pytest.raises(InputError, match="unknown key 'train.stepz'.*did you mean"):
        moe_jax.train({"train": {"stepz": 3}}, model, [batch()])
    with pytest.raises(InputError, match="learning_rate = 0.0 must be above 0"):
        moe_jax.train(RECIPE, model, [batch()], overrides=["optimizer.learning_rate=0.0"])
    with pytest.raises(InputError, match="key 'run_dir' is missing"):
        moe_jax.train(RECIPE)
    with pytest.raises(InputError, match="on_step goes with batches"):
        moe_jax.train(RECIPE, on_step=print)
    with pytest.raises(InputError, match="model.output_dtype"):
        moe_jax.train(RECIPE | {"model": {"output_dtype": "bfloat16"}}, model, [batch()])
    with pytest.raises(InputError, match="model.init"):
        moe_jax.train(RECIPE | {"model": {"init": "random"}}, model, [batch()])
    with pytest.raises(InputError, match="restart and verbose"):
        moe_jax.train(RECIPE, model, [batch()], resume=True)
    with pytest.raises(FileNotFoundError, match="no recipe at"):
        moe_jax.train(tmp_path / "recipe.toml")


@long
def test_a_whole_run_from_keys_and_from_a_file_gives_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dense_config(num_layers=1, vocab_size=258, bos_id=BOS, eos_ids=(EOS,))
    (tmp_path / "text.txt").write_text("Once upon a time there was a model of bytes. " * 40)
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    write_model(tmp_path / "dense", config, random_leaves(config), (tokenizer,))
    recipe = {
        "run_dir": "run",
        "model": {"path": tmp_path / "dense"},
        "data": {"seq_len": 16, "sources": [{"path": "text.txt"}]},
        "train": {"steps": 2, "batch_size": 8},
        "log": {"tensorboard": False},
    }
    trained = moe_jax.train(recipe)
    assert trained.path.resolve() == (tmp_path / "run" / "model").resolve() and trained.tokenizer is not None
    assert trained.lineage[-1]["measured"]["steps"] == 2
    again = moe_jax.train(tmp_path / "run" / "recipe.toml", overrides=["run_dir=again"])
    assert leaves(again) == leaves(trained)
    longer = moe_jax.train(recipe, overrides=["train.steps=3"], resume=True)
    assert longer.lineage[-1]["measured"]["steps"] == 3
