"""Paths: what is no path of a local disk, what no model can lie at, what lies inside its source, what is on the Hub."""

import os
from pathlib import Path

import pytest

import moe_jax
from moe_jax.api.open_source import open_source, read_config
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.files.staging import check_beside, check_local, check_model_path, refuse_existing
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from moe_jax.training.recipe import load_recipe
from tests.support.dense_models import dense_config, random_leaves, write_model


@pytest.mark.parametrize("path", ["s3://a/b", "https://host/a", "file:///a", "hf://a/b", "a\0b"])
def test_what_is_not_local_is_refused_wherever_a_model_is_read_or_written(path):
    for use in (check_local, check_model_path, open_source, read_config, lambda p: refuse_existing(Path(p))):
        with pytest.raises(InputError, match="is an address|holds a zero byte"):
            use(path)
        with pytest.raises(InputError, match="is an address|holds a zero byte"):
            use(Path(path))


@pytest.mark.parametrize("path", ["gs://bucket/a", Path("gs://bucket/a")])
def test_what_may_be_in_a_bucket_is_said_where_it_may_not(path):
    check_model_path(path)
    with pytest.raises(InputError, match="'gs://bucket/a' is an address"):
        check_local(path)
    with pytest.raises(InputError, match="address and not"):
        refuse_existing(Path(path))


def test_ways_between_places_lead_there():
    for begin, place, way in (
        ("/models/a", "/models/b/c", "../b/c"),
        ("gs://bucket/models/a", "gs://bucket/b", "../../b"),
        ("/models/a", "gs://bucket/b", None),
        ("gs://bucket/a", "/models/b", None),
        ("gs://bucket/a", "gs://another/a", None),
    ):
        assert as_path(begin).way_to(as_path(place)) == way
        assert as_path(begin).follow(way or place) == as_path(place)


@pytest.mark.parametrize("path", ["gs://", "gs://Bucket/a", "gs://b/a", "gs://bucket/../a"])
def test_what_is_no_address_of_a_bucket(path):
    with pytest.raises(InputError, match="name of a bucket|has . or .. in it"):
        check_model_path(path)


@pytest.mark.parametrize("path", ["/a/b", "a", "C:/models/a", "c:a", "a:b", "dir/a:/b", "runs/x@100"])
def test_paths(path):
    check_model_path(path)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = Path(os.fsdecode(b"name-\xff"))
    for use in (open_source, refuse_existing):
        with pytest.raises(InputError, match="udcff' is not UTF-8"):
            use(bad)


@pytest.mark.parametrize(
    "key",
    ["data.tokenizer", "eval.text", "data.sources"],
)
def test_recipes_name_paths_or_buckets_that_are_read(tmp_path, key):
    (tmp_path / "a.toml").write_text('run_dir = "r"\nmodel.path = "m"\neval.text = "t"\n')

    def load(place):
        value = f'[{{path="{place}"}}]' if key == "data.sources" else place
        return load_recipe(tmp_path / "a.toml", [f"{key}={value}"])

    load("gs://bucket/x")
    with pytest.raises(InputError, match="'s3://bucket/x' is an address"):
        load("s3://bucket/x")


def test_a_target_inside_its_source_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "model" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "model" / "below")
    for target in ("model/out", "model/below/out", "link/out", "model/../model/out"):
        with pytest.raises(InputError, match="lies inside .*model, which .* from"):
            check_beside(tmp_path / target, [tmp_path / "model"])
    for target in ("out", "modelling", "model-2/out"):
        check_beside(tmp_path / target, [tmp_path / "model"])
    config = dense_config(num_layers=1)
    write_model(tmp_path / "dense", config, random_leaves(config))
    entry = {"command": "test", "options": {}, "sources": [{"path": str(tmp_path / "dense"), "fingerprint": "x"}]}
    before = sorted((tmp_path / "dense").rglob("*"))
    with pytest.raises(InputError, match="dense/out lies inside .*dense"):
        ModelDirectoryWriter(tmp_path / "dense" / "out", config, tokenizer_files=(), lineage=[entry])
    assert sorted((tmp_path / "dense").rglob("*")) == before


def test_a_run_inside_the_model_that_it_trains_is_refused(tmp_path):
    config = dense_config(num_layers=1)
    write_model(tmp_path / "dense", config, random_leaves(config))
    recipe = {"run_dir": str(tmp_path / "dense" / "run"), "model": {"path": str(tmp_path / "dense")}}
    with pytest.raises(InputError, match="dense/run lies inside .*dense"):
        moe_jax.train(recipe)
    assert not (tmp_path / "dense" / "run").exists()


@pytest.mark.parametrize("file", ["config.json", "base.json", "lineage.json"])
@pytest.mark.parametrize(
    "content", ['{"format":' * 50_000, "[" * 50_000, '{"format": 1, "format": 2}', "[5]", '{"a": ' + "9" * 5000 + "}"]
)
def test_files_that_cannot_be_read_are_one_line(tmp_path, capsys, file, content):
    config = dense_config(num_layers=1)
    write_model(tmp_path / "model", config, random_leaves(config))
    (tmp_path / "model" / file).write_text(content)
    assert cli.main(["inspect", str(tmp_path / "model")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-jax: error: ") and err.count("\n") == 1 and len(err) < 400 + len(str(tmp_path))


def test_an_absent_path_names_the_one_beside_it_that_is_nearly_the_same(tmp_path):
    (tmp_path / "recipe.toml").touch()
    assert nearest_path(tmp_path / "recpie.toml") == " (did you mean 'recipe.toml'?)"
    assert nearest_path(tmp_path / "other.txt") == nearest_path(tmp_path / "no" / "recipe.toml") == ""
    (tmp_path / "recipes").mkdir()
    assert nearest_path(str(tmp_path / "recpies" / "one.toml")) == " (did you mean 'recipes'?)"
    assert nearest_path(tmp_path / "recipe.toml") == ""


def test_a_folder_in_the_place_of_a_recipe_is_named_for_what_it_is(tmp_path):
    with pytest.raises(InputError, match="expected a recipe"):
        load_recipe(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(InputError, match="of a model"):
        load_recipe(tmp_path)


def test_a_folder_in_the_place_of_a_text_is_named_for_what_it_is(tmp_path, capsys):
    for words in (["eval", str(tmp_path), "--text"], ["compress", str(tmp_path), str(tmp_path / "o"), "--calibrate"]):
        method = ["--method", "quantize", "--bits", "4"] * (words[0] == "compress")
        assert cli.main([*words, str(tmp_path), *method]) == 2
        assert f"{tmp_path} is a directory, expected a file" in capsys.readouterr().err


def test_a_pattern_of_many_depths_takes_no_time_or_is_refused(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c.txt").touch()
    assert as_path(tmp_path / ("**/" * 300 + "*.txt")).matching() == [tmp_path / "a/b/c.txt"]
    with pytest.raises(InputError, match=r"\*\*"):
        as_path(tmp_path / ("**/*/" * 30 + "*.txt")).matching()


def test_a_store_of_tensorstore_has_a_path_without_steps_up(tmp_path):
    """`..` after a link leads out of the folder that the link names."""
    (tmp_path / "deep" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "folder")
    for way in ("deep/run", "link/../run", "deep/folder/../../deep/run"):
        assert as_path(tmp_path / way).kvstore() == {"driver": "file", "path": f"{tmp_path.resolve()}/deep/run/"}
