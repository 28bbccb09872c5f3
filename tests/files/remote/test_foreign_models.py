"""Hugging Face directories, GGUF files and PyTorch files in a bucket: read by ranges, and exported there."""

import shutil

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.conversion import export
from moe_jax.conversion.hugging_face_dir import open_checkpoint
from moe_jax.conversion.spec import ExportSpec
from moe_jax.core.errors import InputError
from moe_jax.files import byte_files, objects, regular_files
from moe_jax.files.byte_files import open_bytes, size_of
from moe_jax.files.storage_path import as_path
from tests.files.remote.kills import killed_at, no_waiting  # noqa: F401
from tests.support import gguf_files
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.hf_checkpoints import BASE, random_tensors, write_checkpoint
from tests.support.tiers import long

HF = "gs://bucket/models/hf"


@pytest.fixture
def dense(tmp_path):
    config = dense_config(num_layers=3)
    write_model(tmp_path / "dense", config, random_leaves(config))
    return open_source(tmp_path / "dense")


def upload(bucket, folder, prefix):
    for file in folder.iterdir():
        bucket.store(f"{prefix}/{file.name}", file.read_bytes())


def same(one, other):
    assert one.specs().keys() == other.specs().keys()
    for name in other.specs():
        np.testing.assert_array_equal(one.read(name), other.read(name))


@pytest.mark.parametrize("size", [0, 1, 100, 1024, 1025, 4096, 70_001, 3_000_000])
def test_how_many_bytes_an_object_has(bucket, monkeypatch, size):
    """Google's answers say it, TensorStore does not hand it on."""
    monkeypatch.setattr(byte_files, "HEAD_BYTES", 1024)
    monkeypatch.setattr(objects, "_REST", 512)
    content = np.random.default_rng(0).bytes(size)
    bucket.store("file", content)
    assert size_of("gs://bucket/file") == size
    assert bucket.bytes_read < 4096
    with open_bytes("gs://bucket/file") as file:
        assert not file.ends_at(size + 1) and file.ends_at(size)
    with open_bytes("gs://bucket/file") as file:
        assert size == 0 or not file.ends_at(size - 1)
        assert file.bytes_at(max(0, size - 10), 100) == content[-10:]
        assert file.bytes_at(size + 5, 10) == b""
        file.seek(0)
        assert file.read() == content
    with pytest.raises(FileNotFoundError, match="gs://bucket/none does not exist"):
        open_bytes("gs://bucket/none")


def test_only_the_ranges_of_a_tensor_are_read(bucket, dense, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_files, "HEAD_BYTES", 1024)
    export(dense, tmp_path / "hf")
    upload(bucket, tmp_path / "hf", "models/hf")
    size = len(bucket.content("models/hf/model.safetensors"))
    source = open_source(HF)
    specs = source.specs()
    bucket.bytes_read = 0
    leaf = source.read("layers/1/mlp/up/kernel")
    # The file is opened again, by another thread than that which read the header.
    assert bucket.bytes_read == leaf.nbytes + 1024 < size / 4
    bucket.bytes_read, before = 0, regular_files.traffic_so_far()
    source.read("layers/1/mlp/down/kernel")
    assert bucket.bytes_read == (regular_files.traffic_so_far() - before).read == leaf.nbytes
    assert sum(np.prod(spec.shape) for spec in specs.values()) * 4 < size
    same(source, dense)
    assert "model.safetensors" in {file.name for file in source.checkpoint.files}


@long
def test_faults_on_the_way(bucket, dense, tmp_path):
    """Each request fails twice: by a status, or by a connection that is cut."""
    export(dense, tmp_path / "hf", ExportSpec(max_shard_size="8KB"))
    failed = {}

    def fault(request):
        key = (request.verb, request.name)
        failed[key] = failed.get(key, 0) + 1
        if failed[key] == 1:
            return 503
        if failed[key] == 2:
            raise ConnectionError
        return None

    upload(bucket, tmp_path / "hf", "models/hf")
    bucket.fault = fault
    same(open_source(HF), dense)
    export(open_source(HF), "gs://bucket/models/again", ExportSpec(max_shard_size="8KB"))
    same(open_source("gs://bucket/models/again"), dense)


def test_a_file_that_is_replaced_while_it_is_read(bucket, dense, tmp_path):
    export(dense, tmp_path / "hf")
    upload(bucket, tmp_path / "hf", "models/hf")
    source = open_source(HF)
    source.specs()
    upload(bucket, tmp_path / "hf", "models/hf")
    with pytest.raises(InputError, match=f"{HF}/model.safetensors was replaced"):
        source.read("final_norm/scale")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-1], "ends 1 bytes after"),
        (lambda content: content + b"x", "1 bytes at its"),
        (lambda content: content[:200], "header should take"),
        (lambda content: content[:5], "its .* take 8 bytes, .* has 5"),
        (lambda content: (1 << 60).to_bytes(8, "little") + content[8:], "header should take 1152921504606846976"),
    ],
)
def test_damaged_files_are_told_as_on_a_disk(bucket, dense, tmp_path, monkeypatch, change, said):
    monkeypatch.setattr(byte_files, "HEAD_BYTES", 64)
    export(dense, tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(change(weights.read_bytes()))
    upload(bucket, tmp_path / "hf", "models/hf")
    for place in (tmp_path / "hf", HF):
        with pytest.raises(InputError, match=said):
            open_checkpoint(as_path(place))


def test_a_long_part_is_read_in_pieces(bucket, monkeypatch):
    monkeypatch.setattr(byte_files, "HEAD_BYTES", 64)
    monkeypatch.setattr(byte_files, "PIECE_BYTES", 100)
    monkeypatch.setattr(byte_files, "AT_ONCE", 3)
    begun, pool = [], byte_files.ThreadPoolExecutor
    monkeypatch.setattr(byte_files, "ThreadPoolExecutor", lambda threads: begun.append(threads) or pool(threads))
    content = bytes(range(256)) * 2
    bucket.store("data/bytes", content)
    for position, length in ((0, 512), (70, 250), (70, 150), (70, 100), (500, 12), (300, 400), (512, 8)):
        with open_bytes("gs://bucket/data/bytes") as file:  # whose size is not known yet
            out, expected = bytearray(length), content[position : position + length]
            assert file.read_at(position, out) == len(expected) and out[: len(expected)] == expected
    assert max(begun) == 3 and min(begun) == 2


def test_files_of_other_formats(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_files, "HEAD_BYTES", 512)
    config = BASE | {"model_type": "llama", "tie_word_embeddings": False}
    tensors = random_tensors(config)
    write_checkpoint(tmp_path / "hf", config, tensors)
    gguf_files.write_gguf(tmp_path / "model.gguf", config, tensors)
    bucket.store("models/model.gguf", (tmp_path / "model.gguf").read_bytes())
    there = open_source("gs://bucket/models/model.gguf")
    same(there, open_source(tmp_path / "model.gguf"))
    assert there.fingerprint() == open_source(tmp_path / "model.gguf").fingerprint()
    bucket.store("models/model.gguf", (tmp_path / "model.gguf").read_bytes())
    with pytest.raises(InputError, match="model.gguf was replaced while"):
        there.read("final_norm/scale")
    import torch

    torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "hf" / "model.safetensors").unlink()
    shutil.move(tmp_path / "pytorch_model.bin", tmp_path / "hf")
    upload(bucket, tmp_path / "hf", "models/hf")
    same(open_source(HF), open_source(tmp_path / "hf"))


@pytest.mark.parametrize("delay", [0, 1000], ids=["lists at once", "lists much later"])
def test_an_export_is_killed_and_goes_on(bucket, dense, monkeypatch, no_waiting, delay):  # noqa: F811
    """At any request; config.json is written last, and what is whole is not written again."""
    bucket.delay = delay

    def job():
        export(dense, HF, ExportSpec(max_shard_size="8KB"))

    for number in (1, 15, 20, 25, 27, 29, 31):
        assert killed_at(number, job, monkeypatch)
        assert "models/hf/config.json" not in bucket.names()
        with pytest.raises((InputError, FileNotFoundError)):
            open_source(HF)
    bucket.requests.clear()
    job()
    puts = [r.name for r in bucket.requests if r.verb == "put" and r.name.startswith("models/hf/")]
    assert puts[-1] == "models/hf/config.json"
    same(open_source(HF), dense)
    assert not [name for name in bucket.names() if ".partial" in name]


def test_shards_that_are_whole_are_not_written_again(bucket, dense, monkeypatch, no_waiting):  # noqa: F811
    def put():
        return [r.name for r in bucket.requests if r.verb == "put" and r.name.endswith(".safetensors")]

    bucket.fault = lambda request: 400 if request.verb == "put" and "model-00003" in request.name else None
    with pytest.raises(OSError, match="model-00003") as caught:
        export(dense, HF, ExportSpec(max_shard_size="8KB"))
    assert any("the same command goes on" in note for note in caught.value.__notes__)
    bucket.fault = None
    first = [name for name in put() if "00003" not in name]
    assert first
    bucket.requests.clear()
    export(dense, HF, ExportSpec(max_shard_size="8KB"))
    assert put() and not set(first) & set(put())
    same(open_source(HF), dense)


def test_lora_for_peft(bucket, tmp_path, capsys):
    from tests.support.training_models import FFN, config_of

    config = config_of(FFN)
    write_model(tmp_path / "dense", config, random_leaves(config))
    adapter = "gs://bucket/adapter"
    arguments = ["--method", "lora", "--adapter", "lora:2", "--targets", "q", "--no-step0-check"]
    assert cli.main(["adapt", str(tmp_path / "dense"), adapter, *arguments]) == 0
    assert cli.main(["export", adapter, "gs://bucket/peft", "--format", "peft"]) == 0, capsys.readouterr().err
    puts = [request.name for request in bucket.requests if request.verb == "put" and request.name.startswith("peft/")]
    assert puts[-1] == "peft/adapter_config.json"
    assert {name for name in bucket.names() if name.startswith("peft/")} == set(puts)
    assert cli.main(["export", adapter, "gs://bucket/peft", "--format", "peft"]) == 2
    assert "gs://bucket/peft already exists" in capsys.readouterr().err
