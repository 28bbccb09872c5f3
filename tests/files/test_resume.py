"""Commands that are interrupted go on at the last whole layer, and what comes out is what would have come out."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from moe_jax.checkpoints.leaf_files import LeafWriter
from moe_jax.conversion import HuggingFaceDirectory, convert, export, to_hugging_face
from moe_jax.conversion.spec import ExportSpec
from moe_jax.core.errors import InputError
from moe_jax.files import staging
from moe_jax.model_io import in_memory
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.model_source import ModelSource
from moe_jax.peft.adapt import adapt
from moe_jax.peft.merge import merge
from moe_jax.peft.spec import AdaptSpec
from moe_jax.upcycling import UpcycleSpec, upcycle
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.disks import content_of
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint
from tests.support.tiers import one_in

QUIET = Console(quiet=True)


class Watched:
    """A source that says which leaves are read, and of which a second reading is an error."""

    def __init__(self, source: ModelSource, read: list[str]):
        self._source, self._read = source, read

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def read(self, path: str):
        self._read.append(path)
        return self._source.read(path)


def converting(folder: Path, read: list[str], monkeypatch) -> Callable[[Path], object]:
    source = write_checkpoint(folder / "foreign", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    original = HuggingFaceDirectory.read
    monkeypatch.setattr(
        HuggingFaceDirectory, "read", lambda self, path, *rest: (read.append(path), original(self, path, *rest))[1]
    )
    return lambda dst: convert(source, dst, console=QUIET)


def upcycling(folder: Path, read: list[str], monkeypatch) -> Callable[[Path], object]:
    config = dense_config()
    dense = write_model(folder / "dense", config, random_leaves(config))
    spec = UpcycleSpec(experts=3, top_k=2, delta="low-rank:2", step0_check=False)

    def run(dst: Path) -> None:
        source = Watched(ModelDirectory(dense), read)
        upcycle(source, dst, spec)  # pyright: ignore[reportArgumentType]

    return run


def merging(folder: Path, read: list[str], monkeypatch) -> Callable[[Path], object]:
    config = dense_config()
    dense = ModelDirectory(write_model(folder / "dense", config, random_leaves(config)))
    memory = in_memory.InMemory()
    adapt(dense, memory, AdaptSpec(method="lora", adapter="lora:2", targets="q,up", step0_check=False))
    return lambda dst: merge(Watched(memory.source, read), dst)  # pyright: ignore[reportArgumentType]


@one_in(2)
@pytest.mark.parametrize("begin", [converting, upcycling, merging])
def test_a_model_directory_goes_on_at_the_leaf(begin, tmp_path, monkeypatch):
    read: list[str] = []
    (tmp_path / "given").mkdir()
    command = begin(tmp_path / "given", read, monkeypatch)
    command(tmp_path / "undisturbed")
    leaves = set(read)
    read.clear()
    saved, save = [], LeafWriter.write

    def full(writer, leaves):
        if len(saved) == 12:
            raise OSError(28, "No space left on device", str(writer._directory))
        saved.extend(leaves)
        save(writer, leaves)

    with monkeypatch.context() as patch:
        patch.setattr(LeafWriter, "write", full)
        with pytest.raises(OSError, match="No space left") as stopped:
            command(tmp_path / "out")
    assert "moe-jax clean" in stopped.value.__notes__[0]
    assert sorted(os.listdir(tmp_path)) == [".out.partial", "given", "undisturbed"]
    read.clear()
    command(tmp_path / "out")
    assert content_of(tmp_path / "out") == content_of(tmp_path / "undisturbed")
    assert set(read) < leaves and not set(read) & set(saved)
    assert sorted(os.listdir(tmp_path)) == ["given", "out", "undisturbed"]


def test_an_export_goes_on_at_the_layer(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "foreign", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    (source / "tokenizer.json").write_text("{}")
    before = content_of(source)
    export(HuggingFaceDirectory(source), tmp_path / "undisturbed", ExportSpec(max_shard_size="40kB"), console=QUIET)
    written: list[str] = []
    write = to_hugging_face.LeafWriting._write_leaf

    def write_leaf(writing, path):
        if path.startswith("layers/1/"):
            raise OSError(28, "No space left on device", "out")
        written.append(path)
        write(writing, path)

    with monkeypatch.context() as patch:
        patch.setattr(to_hugging_face.LeafWriting, "_write_leaf", write_leaf)
        with pytest.raises(OSError, match="No space left") as stopped:
            export(HuggingFaceDirectory(source), tmp_path / "out", ExportSpec(max_shard_size="40kB"), console=QUIET)
    assert "moe-jax clean" in stopped.value.__notes__[0]
    again: list[str] = []
    monkeypatch.setattr(
        to_hugging_face.LeafWriting,
        "_write_leaf",
        lambda writing, path: (again.append(path), write(writing, path)),
    )
    export(HuggingFaceDirectory(source), tmp_path / "out", ExportSpec(max_shard_size="40kB"), console=QUIET)
    assert not set(again) & set(written) and {path.split("/")[0] for path in written} > {"layers"}
    assert content_of(tmp_path / "out") == content_of(tmp_path / "undisturbed") and content_of(source) == before
    assert sorted(os.listdir(tmp_path)) == ["foreign", "out", "undisturbed"]


def test_an_export_of_other_options_begins_anew(tmp_path, monkeypatch):
    source = HuggingFaceDirectory(write_checkpoint(tmp_path / "m", CONFIGS["llama"], random_tensors(CONFIGS["llama"])))
    write = to_hugging_face.LeafWriting._write_leaf

    def stop(writing, path):
        write(writing, path)
        if path.startswith("layers/1/"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(to_hugging_face.LeafWriting, "_write_leaf", stop)
        with pytest.raises(KeyboardInterrupt):
            export(source, tmp_path / "out", console=QUIET)
    for dst in ("out", "undisturbed"):
        export(source, tmp_path / dst, ExportSpec(dtype="bfloat16"), console=QUIET)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "undisturbed")


def test_files_that_another_command_moves_away_do_not_disturb_the_look_for_room(tmp_path, monkeypatch):
    begun = tmp_path / ".target.partial" / "saving"
    begun.mkdir(parents=True)
    for name in ("moved", "stays"):
        (begun / name).write_bytes(b"x" * 100_000)
    walk = os.walk

    def walk_while_another_moves(top):
        for parent, folders, names in walk(top):
            (begun / "moved").unlink(missing_ok=True)
            yield parent, folders, names

    monkeypatch.setattr(staging.os, "walk", walk_while_another_moves)
    free = shutil.disk_usage(tmp_path).free
    staging.require_space(tmp_path / "target", free // 2)
    with pytest.raises(InputError, match="choose another disk"):
        staging.require_space(tmp_path / "target", 2 * free + 10**9)
