"""Files and directories that appear whole or not at all."""

import errno
import os
import pathlib
import re

import pytest

from moe_jax.commands import cli
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.core.errors import InputError
from moe_jax.data import sources
from moe_jax.files import staging
from moe_jax.files.staging import (
    Workplace,
    check_target,
    check_writable,
    remove_replaced,
    replace_directory,
    staged_directory,
)
from moe_jax.files.storage_path import as_path
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint


def folder(path, content: str):
    path.mkdir()
    (path / "file").write_text(content)
    return path


def names(path) -> list[str]:
    return sorted(child.name for child in path.iterdir())


def test_a_staged_directory_appears_at_the_end_or_not_at_all(tmp_path):
    with staged_directory(tmp_path / "a" / "out") as partial:
        (partial / "file").write_text("new")
        assert names(tmp_path / "a") == [".out.partial"]
    assert names(tmp_path / "a") == ["out"] and (tmp_path / "a" / "out" / "file").read_text() == "new"
    with pytest.raises(ZeroDivisionError), staged_directory(tmp_path / "b") as partial:
        (partial / "file").write_text(str(1 // 0))
    assert names(tmp_path) == ["a"]


def test_what_appeared_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(InputError, match="out already exists"), staged_directory(tmp_path / "out"):
        folder(tmp_path / "out", "another's")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "another's"


def test_where_nothing_can_be_made_is_known_before_anything_is(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    for target in ("file/out", "file/a/out", "gone/out"):
        with pytest.raises(InputError, match=rf"{target} cannot be made: .*/(file|gone) "):
            check_target(tmp_path / target)
    with pytest.raises(InputError, match="/proc/out cannot be made: /proc cannot be written"):
        check_target(pathlib.Path("/proc/out"))
    with pytest.raises(InputError, match="cannot be written .*File name too long"):
        check_target(tmp_path / ("x" * 250))  # its partial folder has a longer one
    with pytest.raises(InputError, match="file already exists"):
        check_target(tmp_path / "file")
    before = sorted(tmp_path.iterdir())
    check_target(tmp_path / "out")
    check_target(tmp_path / "a" / "b" / "out")
    check_writable(tmp_path / "file")  # in a place where there may be something
    assert sorted(tmp_path.iterdir()) == before

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "mkdir", full)
    check_target(tmp_path / "out")


@pytest.mark.parametrize(
    "command",
    ["convert M F/x", "export M F/x", "upcycle M F/x --experts 2", "merge M F/x",
     "adapt M F/x --method lora --adapter lora:2 --targets q", "compress M F/x --method quantize --bits 4",
     "inspect M --plots F/x", "report M --out F/x", "train recipe.toml", "train recipe.toml --resume",
     "data tokenize recipe.toml F/x"],
)  # fmt: skip
def test_commands_say_at_once_that_nothing_can_be_written(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "M", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    pathlib.Path("F").touch(), pathlib.Path("file").touch()
    recipe = 'run_dir = "F/x"\nmodel.path = "M"\ndata = {tokenizer = "file", sources = [{path = "file"}]}\n'
    pathlib.Path("recipe.toml").write_text(recipe + "[train]\nsteps = 1\nbatch_size = 1\n")

    def read(*_, **__):
        raise AssertionError("weights or data are read first")

    monkeypatch.setattr(HuggingFaceDirectory, "fingerprint", read)
    monkeypatch.setattr(HuggingFaceDirectory, "read", read)
    monkeypatch.setattr(sources, "find_files", read)
    assert cli.main(command.split()) == 2
    err = capsys.readouterr().err
    assert "cannot be made: " in err and "/F is not a" in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["F", "M", "file", "recipe.toml"]


def test_a_file_has_the_old_content_or_the_new(tmp_path):
    file = tmp_path / "file"
    as_path(file).replace_content(b"one")
    as_path(file).replace_content(b"two")
    with pytest.raises(ZeroDivisionError), as_path(file).replacing() as handle:
        handle.write(b"thr")
        assert file.read_bytes() == b"two"
        raise ZeroDivisionError
    assert file.read_bytes() == b"two" and names(tmp_path) == ["file"]
    as_path(file).replace_content(b"three")
    assert file.read_bytes() == b"three" and names(tmp_path) == ["file"]


def test_a_directory_is_replaced(tmp_path):
    tmp_path = as_path(tmp_path)
    replace_directory(tmp_path / "model", folder(tmp_path / "fresh", "one"))
    replace_directory(tmp_path / "model", folder(tmp_path / "fresh", "two"))
    remove_replaced(tmp_path / "model")
    assert names(tmp_path) == ["model"] and (tmp_path / "model" / "file").read_text() == "two"


def test_a_link_to_a_directory_is_replaced_and_the_directory_stays(tmp_path):
    tmp_path = as_path(tmp_path)
    folder(tmp_path / "elsewhere", "zero")
    (tmp_path / "model").symlink_to("elsewhere")
    for content in ("one", "two"):
        fresh = folder(tmp_path / "fresh", content)
        remove_replaced(tmp_path / "model")
        replace_directory(tmp_path / "model", fresh)
        assert names(tmp_path) == ["elsewhere", "model"] and (tmp_path / "model" / "file").read_text() == content
    assert (tmp_path / "elsewhere" / "file").read_text() == "zero"


@pytest.mark.parametrize("killed", ["before the new one is there", "before the old one is removed"])
def test_killed_while_a_directory_is_replaced_one_of_the_two_is_left(tmp_path, monkeypatch, killed):
    tmp_path = as_path(tmp_path)
    target, fresh = folder(tmp_path / "model", "old"), folder(tmp_path / "fresh", "new")
    step = "rename_durably" if killed == "before the new one is there" else "shutil.rmtree"

    def kill(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"moe_jax.files.staging.{step}", kill)
        with pytest.raises(KeyboardInterrupt):
            replace_directory(target, fresh)
    remove_replaced(target)
    expected = {"rename_durably": ("old", ["fresh", "model"]), "shutil.rmtree": ("new", ["model"])}[step]
    assert ((target / "file").read_text(), names(tmp_path)) == expected


def test_killed_while_work_is_completed_it_is_not_begun_anew(tmp_path, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    for step in ("remove_tree", "sync"):
        with pytest.raises(KeyboardInterrupt), Workplace(tmp_path / "out", job=1) as work:
            (work.folder / "file").write_text("whole")
            work.note("a", 1)
            with monkeypatch.context() as patch:
                patch.setattr(type(work.folder), step, kill)
                work.complete()
    with Workplace(tmp_path / "out", job=1) as work:
        assert (work.folder / "file").read_text() == "whole"
        work.complete()
    assert names(tmp_path / "out") == ["file"]


def test_folders_above_a_target_that_is_refused_are_removed_with_it(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError), Workplace(tmp_path / "there" / "a" / "b" / "out", job=1):
        raise InputError("weights that will be no better next time")
    assert names(tmp_path) == ["there"] and names(tmp_path / "there") == []
    with pytest.raises(InputError), Workplace(tmp_path / "a" / "b" / "out", job=1):
        (tmp_path / "a" / "of the user").touch()
        raise InputError("weights that will be no better next time")
    assert names(tmp_path / "a") == ["of the user"]


def test_what_interrupted_commands_left_is_cleaned(tmp_path, capsys):
    for target in ("model", "run/model.new"):
        with pytest.raises(OSError), Workplace(tmp_path / target, job=1) as work:
            (work.folder / "file").write_bytes(bytes(1000))
            raise OSError(28, "No space left on device")
    folder(tmp_path / ".notes.partial", "of the user: no command has written this")
    assert cli.main(["clean", str(tmp_path / "run")]) == 0
    assert names(tmp_path / "run") == [] and ".model.partial" in names(tmp_path)
    assert re.fullmatch(r"removed .*/run/\.model\.new\.partial: \d[\d.,]* k?B\n", capsys.readouterr().out)
    with Workplace(tmp_path / "model", job=1):
        assert cli.main(["clean", str(tmp_path / "model")]) == 2
    assert "command is writing" in capsys.readouterr().err
    with pytest.raises(OSError), Workplace(tmp_path / "model", job=1) as work:
        raise OSError(28, "No space left on device")
    assert cli.main(["clean", str(tmp_path / "model")]) == 0
    assert names(tmp_path) == [".notes.partial", "run"] and "removed" in capsys.readouterr().out
    assert cli.main(["clean", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.startswith("nothing to remove")


def test_work_inside_of_what_is_removed_is_not_said_to_be_kept(tmp_path):
    with pytest.raises(OSError) as failed, staged_directory(tmp_path / "sweep") as folder:
        with Workplace(folder / "model", job=1):
            raise OSError(28, "No space left on device")
    assert failed.value.__notes__ == [] and names(tmp_path) == []


def test_a_folder_that_was_renamed_before_it_was_locked_is_left_alone(tmp_path, monkeypatch):
    """Two commands with one target: the first completes while the second waits between opening and locking."""
    first = Workplace(tmp_path / "out")
    lock = staging.lock_directory

    def complete_first(folder, target):
        monkeypatch.setattr(staging, "lock_directory", lock)
        descriptor = os.open(folder, os.O_RDONLY)
        first.complete()
        return descriptor

    with first:
        (first.folder / "file").write_text("whole")
        monkeypatch.setattr(staging, "lock_directory", complete_first)
        with pytest.raises(InputError, match="out already exists"), Workplace(tmp_path / "out"):
            pass
    assert (tmp_path / "out" / "file").read_text() == "whole" and names(tmp_path) == ["out"]
