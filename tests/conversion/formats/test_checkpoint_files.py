"""Finding the files of a checkpoint: indices that lie, files that are missing, tensors in two places."""

import json
import os
import pathlib
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.conversion.hugging_face_dir import open_checkpoint
from moe_jax.core.errors import InputError
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_checkpoint(tmp_path / "sharded", CONFIGS["llama"], random_tensors(CONFIGS["llama"]), shards=2)


def edit_index(folder: pathlib.Path, edit) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


def complaint(folder: pathlib.Path) -> str:
    with pytest.raises(InputError) as error:
        open_checkpoint(folder)
    return str(error.value)


def test_finds_all_shards(sharded: pathlib.Path):
    found = open_checkpoint(sharded)
    assert [file.name for file in found.files] == ["model.safetensors.index.json", FIRST, SECOND]
    assert found.tensors.keys() == random_tensors(CONFIGS["llama"]).keys()


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "a/../../x", "..", "C:\\x.safetensors", "..\\x.safetensors", "\\\\h\\x", ""],
)
def test_an_index_may_not_leave_its_folder(sharded: pathlib.Path, name: str):
    edit_index(sharded, lambda weight_map: weight_map.update({"model.norm.weight": name}))
    message = complaint(sharded)
    assert message == f"{sharded / 'model.safetensors.index.json'}: it names {name!r}, which is not inside its folder"


def test_links_are_followed_as_in_the_cache_of_the_hub(sharded: pathlib.Path, tmp_path: pathlib.Path):
    (tmp_path / "blobs").mkdir()
    shutil.move(sharded / FIRST, tmp_path / "blobs" / "abc")
    os.symlink(tmp_path / "blobs" / "abc", sharded / FIRST)
    assert len(open_checkpoint(sharded).tensors) == len(random_tensors(CONFIGS["llama"]))


def test_missing_shards_are_all_named(sharded: pathlib.Path):
    (sharded / FIRST).unlink()
    (sharded / SECOND).unlink()
    message = complaint(sharded)
    assert "are not there: 2 problems" in message and FIRST in message and SECOND in message


def test_a_tensor_in_two_files(sharded: pathlib.Path):
    tensors = load_file(sharded / FIRST)
    twice = sorted(load_file(sharded / SECOND))[0]
    save_file({**tensors, twice: load_file(sharded / SECOND)[twice]}, sharded / FIRST)
    assert f"{twice!r} is in two files" in complaint(sharded)


def test_a_tensor_in_another_file_than_the_index_says(sharded: pathlib.Path):
    edit_index(sharded, lambda weight_map: weight_map.update({"model.embed_tokens.weight": SECOND}))
    message = complaint(sharded)
    assert f"'model.embed_tokens.weight' is in {FIRST!r}, but the index says it is in {SECOND!r}" in message


def test_a_tensor_the_index_does_not_name(sharded: pathlib.Path):
    edit_index(sharded, lambda weight_map: weight_map.pop("model.norm.weight"))
    assert "'model.norm.weight' is in" in complaint(sharded) and "the index does not name it" in complaint(sharded)


def test_a_tensor_that_is_in_no_file(sharded: pathlib.Path):
    edit_index(sharded, lambda weight_map: weight_map.update({"nowhere": FIRST}))
    assert f"'nowhere' should be in {FIRST!r}, but is not" in complaint(sharded)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 9999])
def test_a_corrupt_index(sharded: pathlib.Path, content: str):
    (sharded / "model.safetensors.index.json").write_text(content)
    message = complaint(sharded)
    assert "model.safetensors.index.json" in message and "\n" not in message


def test_no_weights_at_all(tmp_path: pathlib.Path):
    message = complaint(tmp_path)
    assert "has no weights" in message and "pytorch_model.bin.index.json" in message and "none of these" in message


def test_shards_without_their_index(sharded: pathlib.Path):
    (sharded / "model.safetensors.index.json").unlink()
    assert f"found only {FIRST!r} without an index; fetch model.safetensors.index.json" in complaint(sharded)


def test_safetensors_go_before_pytorch_files(llama: pathlib.Path):
    (llama / "pytorch_model.bin").write_bytes(b"not looked at")
    assert open_checkpoint(llama).files == (llama / "model.safetensors",)


def test_sharded_pytorch_files(tmp_path: pathlib.Path):
    import torch

    torch.save({"a": torch.ones(2)}, tmp_path / "one.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "two.bin")
    index = {"metadata": {}, "weight_map": {"a": "one.bin", "b": "two.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = open_checkpoint(tmp_path)
    assert {name: entry.shape for name, entry in found.tensors.items()} == {"a": (2,), "b": (3,)}


def test_inputs_are_only_read(llama: pathlib.Path):
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in llama.iterdir()}
    open_checkpoint(llama)
    assert before == {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in llama.iterdir()}
