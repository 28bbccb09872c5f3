"""Model directories in a bucket: written, read, and finished when config.json is there."""

import json

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import by_name, copy_tokenizer_files, tokenizer_files_in
from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.tiers import long
from tests.support.training_models import FFN, config_of

MODEL = "gs://bucket/models/dense"
NO_CHECK = "--no-step0-check"


@pytest.fixture
def dense(tmp_path):
    config = dense_config(num_layers=2)
    leaves = random_leaves(config)
    write_model(tmp_path / "dense", config, leaves)
    return tmp_path / "dense", config, leaves


def write(path, config, leaves, **options):
    with ModelDirectoryWriter(as_path(path), config, tokenizer_files=(), lineage=[], **options) as writer:
        for name, leaf in leaves.items():
            if name not in writer.done:
                writer.write({name: leaf})


def test_a_model_is_read_as_it_was_written(bucket, dense):
    _, config, leaves = dense
    write(MODEL, config, leaves)
    source = open_source(MODEL)
    assert source.config == config and str(source.path) == MODEL
    assert source.specs().keys() == leaves.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(source.read(name), leaf)
    assert source.fingerprint() == ModelDirectory(dense[0]).fingerprint()


def test_config_json_is_written_last_and_nothing_else_is_left(bucket, dense):
    _, config, leaves = dense
    write(MODEL, config, leaves)
    puts = [request.name for request in bucket.requests if request.verb == "put" and "partial" not in request.name]
    assert puts[-1] == "models/dense/config.json"
    assert not [name for name in bucket.names() if ".partial" in name or "attempt" in name]


def test_templates_of_chats_lie_in_a_folder_there_too(bucket):
    """Also where a listing does not show them yet; a list that names anything else in a folder is not followed."""
    bucket.delay = 1000
    files = {"tokenizer.json": b"{}", "additional_chat_templates/rag.jinja": b"x"}
    copy_tokenizer_files(files, as_path(MODEL))
    assert by_name(tokenizer_files_in(as_path(MODEL))).keys() == files.keys()
    bucket.delay = 0
    copied = as_path("gs://bucket/models/copied")
    copy_tokenizer_files(files, copied)
    listed = ["../dense/tokenizer.json", "additional_chat_templates/../merges.txt"]
    (copied / "files.json").write_text(json.dumps({"files": listed}))
    assert by_name(tokenizer_files_in(copied)).keys() == files.keys()
    (copied / "files.json").unlink()
    assert by_name(tokenizer_files_in(copied)).keys() == files.keys()
    assert tokenizer_files_in(copied)[0].read_bytes() == b"x"


@long
def test_every_command_that_takes_a_model(bucket, tmp_path, monkeypatch, capsys):
    """Also what goes with the model, its tokenizer, is read from the bucket. (`train` has a file of its own.)"""
    monkeypatch.chdir(tmp_path)
    config = config_of(FFN)
    byte_tokenizer(tmp_path / "tokenizer.json")
    write_model(tmp_path / "dense", config, random_leaves(config), (tmp_path / "tokenizer.json",))
    (tmp_path / "text.txt").write_text("".join(f"the {i}th line says {i * i}\n" for i in range(60)))
    there, adapter = "gs://bucket/models/moe", "gs://bucket/models/adapter"
    bucket.delay = 1000
    said = []
    for place in (there, "moe"):
        assert cli.main(["upcycle", "dense", place, "--experts", "2", "--top-k", "2", "--every", "1", NO_CHECK]) == 0
        capsys.readouterr()
        assert cli.main(["eval", place, "--text", "text.txt", "--seq-len", "16", "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out)["nll"])
    assert said[0] == said[1]
    one, other = open_source(there), open_source("moe")
    for name in other.specs():
        np.testing.assert_array_equal(one.read(name), other.read(name))
    assert cli.main(["inspect", there]) == 0
    assert "experts" in capsys.readouterr().out
    lora = ["--method", "lora", "--adapter", "lora:2", "--targets", "q"]
    assert cli.main(["adapt", there, adapter, *lora, NO_CHECK]) == 0
    assert cli.main(["generate", adapter, "--prompt", "the ", "--max-new-tokens", "2"]) == 0
    assert cli.main(["export", there, "hf"]) == 0
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert cli.main(["merge", adapter, "gs://bucket/models/merged"]) == 0
    assert open_source("gs://bucket/models/merged").tokenizer_files[0].name == "tokenizer.json"
    method = ["--method", "quantize", "--bits", "8"]
    assert cli.main(["compress", there, "gs://bucket/models/small", *method]) == 0, capsys.readouterr().err
    assert cli.main(["clean", "gs://bucket/models"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
