"""Model directories in a bucket: written, read, and finished when config.json is there."""


import numpy as np
import pytest

from moe_jax import cli
from moe_jax.model_dir import ModelDirectory, ModelDirectoryWriter
from moe_jax.open_source import open_source
from moe_jax.remote.remote_path import as_path
from tests.upcycle.conftest import dense_config, random_leaves, write_model

MODEL = "gs://bucket/models/dense"


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


def test_upcycle_inspect_and_generate(bucket, dense, capsys):
    path, config, leaves = dense
    write(MODEL, config, leaves)
    out = "gs://bucket/models/moe"
    assert cli.main(["upcycle", MODEL, out, "--experts", "2", "--top-k", "2", "--delta", "low-rank:2"]) == 0
    local = path.with_name("moe")
    assert cli.main(["upcycle", str(path), str(local), "--experts", "2", "--top-k", "2", "--delta", "low-rank:2"]) == 0
    there, here = open_source(out), open_source(local)
    for name in here.specs():
        np.testing.assert_array_equal(there.read(name), here.read(name))
    capsys.readouterr()
    assert cli.main(["inspect", out]) == 0
    assert "experts" in capsys.readouterr().out
