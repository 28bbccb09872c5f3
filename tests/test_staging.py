"""Files and directories that appear whole or not at all."""

import pytest

from moe_jax.errors import InputError
from moe_jax.staging import (
    remove_replaced,
    replace_directory,
    replace_file,
    replacing,
    staged_directory,
)


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


def test_a_file_has_the_old_content_or_the_new(tmp_path):
    file = tmp_path / "file"
    replace_file(file, b"one")
    replace_file(file, b"two")
    with pytest.raises(ZeroDivisionError), replacing(file) as handle:
        handle.write(b"thr")
        assert file.read_bytes() == b"two"
        raise ZeroDivisionError
    assert file.read_bytes() == b"two" and names(tmp_path) == ["file"]
    replace_file(file, b"three")
    assert file.read_bytes() == b"three" and names(tmp_path) == ["file"]


def test_a_directory_is_replaced(tmp_path):
    replace_directory(tmp_path / "model", folder(tmp_path / "fresh", "one"))
    replace_directory(tmp_path / "model", folder(tmp_path / "fresh", "two"))
    remove_replaced(tmp_path / "model")
    assert names(tmp_path) == ["model"] and (tmp_path / "model" / "file").read_text() == "two"


@pytest.mark.parametrize("killed", ["before the new one is there", "before the old one is removed"])
def test_killed_while_a_directory_is_replaced_one_of_the_two_is_left(tmp_path, monkeypatch, killed):
    target, fresh = folder(tmp_path / "model", "old"), folder(tmp_path / "fresh", "new")
    step = "rename_durably" if killed == "before the new one is there" else "shutil.rmtree"

    def kill(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"moe_jax.staging.{step}", kill)
        with pytest.raises(KeyboardInterrupt):
            replace_directory(target, fresh)
    remove_replaced(target)
    expected = {"rename_durably": ("old", ["fresh", "model"]), "shutil.rmtree": ("new", ["model"])}[step]
    assert ((target / "file").read_text(), names(tmp_path)) == expected
