"""What is wrong with an address, a bucket, or the way to it: one line, exit code 2, in bounded time."""

import time

import pytest

from moe_jax.commands import cli
from moe_jax.files import objects
from tests.support.dense_models import dense_config, random_leaves, write_model


@pytest.fixture
def dense(tmp_path):
    config = dense_config(num_layers=1)
    write_model(tmp_path / "dense", config, random_leaves(config))
    return str(tmp_path / "dense")


def error_of(arguments, capsys):
    start = time.monotonic()
    assert cli.main(arguments) == 2
    assert time.monotonic() - start < 10
    err = capsys.readouterr().err
    assert err.startswith("moe-jax: error: ") and err.count("\n") == 1, err
    return err


UPCYCLE = ["--experts", "2", "--top-k", "2", "--every", "1", "--no-step0-check"]


def test_no_permission(bucket, dense, capsys):
    bucket.fault = lambda request: 403
    assert "gs://bucket/x: no permission (status 403)" in error_of(["inspect", "gs://bucket/x"], capsys)
    err = error_of(["upcycle", dense, "gs://bucket/x", *UPCYCLE], capsys)
    assert "no permission (status 403); log in with `gcloud auth application-default login`" in err


def test_no_permission_to_write(bucket, dense, capsys):
    bucket.fault = lambda request: 403 if request.verb == "put" else None
    assert "gs://bucket/.x.attempt: no permission" in error_of(["upcycle", dense, "gs://bucket/x", *UPCYCLE], capsys)
    assert "no model at gs://bucket/x: there is no config.json" in error_of(["inspect", "gs://bucket/x"], capsys)


def test_no_such_bucket(bucket, dense, capsys):
    err = error_of(["upcycle", dense, "gs://nobody/x", *UPCYCLE], capsys)
    assert "bucket gs://nobody; check its name" in err
    err = error_of(["inspect", "gs://nobody/x"], capsys)
    assert "gs://nobody/x: there is no config.json" in err


@pytest.mark.parametrize("status", [None, 503])
def test_a_network_that_does_not_answer(bucket, dense, capsys, monkeypatch, status):
    monkeypatch.setenv(objects.SECONDS, "1")
    bucket.fault = lambda request: status or time.sleep(3)
    for arguments in (["inspect", "gs://bucket/x"], ["upcycle", dense, "gs://bucket/x", *UPCYCLE]):
        assert "was not answered within 1 s; is there a network?" in error_of(arguments, capsys)


def test_nobody_there(dense, capsys, monkeypatch):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(objects, "_RETRIES", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "1ms"})
    objects.objects_of.cache_clear()
    err = error_of(["inspect", "gs://bucket/x"], capsys)
    objects.objects_of.cache_clear()
    assert "gs://bucket/x: Could not connect to server; is there a network?" in err


def test_what_is_not_complete_is_no_model(bucket, capsys):
    for name in ("params/state/_METADATA", "lineage.json"):
        bucket.store(f"models/x/{name}", b"{}")
    err = error_of(["inspect", "gs://bucket/models/x"], capsys)
    assert "gs://bucket/models/x is not complete: config.json" in err
    bucket.store("models/x/config.json", b"{}")
    err = error_of(["inspect", "gs://bucket/models/x"], capsys)
    assert "gs://bucket/models/x/config.json has neither format nor model_type nor architectures" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "DENSE", "--text", "a", "--output", "gs://bucket/a"], "'gs://bucket/a' is an address and not a path"),
        (["inspect", "s3://bucket/x"], "'s3://bucket/x' is an address and not a path; models, runs"),
        (["upcycle", "DENSE", "gs://bucket", *UPCYCLE], "gs://bucket is a whole bucket; name a folder in it"),
        (["upcycle", "DENSE", "gs://B/x", *UPCYCLE], "'B' is not the name of a bucket; expected gs://BUCKET/FOLDER"),
    ],
)
def test_what_cannot_be_there(bucket, dense, capsys, arguments, said):
    assert said in error_of([dense if argument == "DENSE" else argument for argument in arguments], capsys)
    assert bucket.names() == []


def test_a_model_is_not_written_over_another(bucket, dense, capsys):
    bucket.store("models/x/config.json", b"{}")
    bucket.store("models/y/notes.txt", b"mine")
    for name in ("x", "y"):
        err = error_of(["upcycle", dense, f"gs://bucket/models/{name}", *UPCYCLE], capsys)
        assert f"gs://bucket/models/{name} already exists; choose another name or remove it" in err
    assert bucket.names() == ["models/x/config.json", "models/y/notes.txt"]


def test_a_seconds_variable_that_is_no_number(bucket, capsys, monkeypatch):
    monkeypatch.setenv(objects.SECONDS, "soon")
    assert "MOE_JAX_STORAGE_SECONDS=soon: expected a number" in error_of(["inspect", "gs://bucket/x"], capsys)
