"""What is opened to be read: regular files alone, and no more of them than was asked for."""

import os

import pytest

from moe_jax.core.errors import InputError
from moe_jax.files.regular_files import open_regular, read_regular, taken_bytes


def test_reads_a_file_and_what_a_link_points_to(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "a", max_bytes=5) == read_regular(tmp_path / "link", max_bytes=5) == b"12345"
    with open_regular(tmp_path / "link") as file:
        assert file.read(2) == b"12"


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("a pipe", os.mkfifo),
        ("a pipe", lambda path: (os.mkfifo(f"{path}.pipe"), os.symlink(f"{path}.pipe", path))),
        ("a device", lambda path: os.symlink("/dev/zero", path)),
        ("a directory", os.mkdir),
    ],
)
def test_refuses_what_never_begins_or_never_ends(tmp_path, kind, make):
    make(tmp_path / "x")
    for read in (open_regular, lambda path: read_regular(path, max_bytes=9)):
        with pytest.raises(InputError, match=f"x is {kind}, expected"):
            read(tmp_path / "x")


def test_refuses_a_file_that_is_too_large_before_it_is_read(tmp_path):
    with open(tmp_path / "x", "wb") as file:
        file.truncate(1 << 40)  # more than there is memory, and no disk
    with pytest.raises(InputError, match="x .* than 1,000 bytes"):
        read_regular(tmp_path / "x", max_bytes=1000)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "y", max_bytes=1000)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux")
def test_refuses_a_file_of_the_system_that_says_it_is_empty():
    assert len(read_regular("/proc/self/maps", max_bytes=1 << 26)) > 1000
    with pytest.raises(InputError, match="more than 1,000 bytes"):
        read_regular("/proc/self/maps", max_bytes=1000)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="Linux")
def test_refuses_a_file_of_the_system_that_cannot_be_read():
    for read in (open_regular, lambda path: read_regular(path, max_bytes=9)):
        with pytest.raises(InputError, match="/proc/self/mem cannot be read: Input/output error"):
            read("/proc/self/mem")


def test_the_bytes_of_a_folder_are_those_of_all_in_it(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "c").write_bytes(b"12345")
    (inner / "link").symlink_to("c")
    (inner / "broken").symlink_to("nothing")
    folders = sum(os.stat(folder).st_size for folder in (tmp_path / "a", inner))
    assert taken_bytes(tmp_path / "a") == folders + 10
    assert taken_bytes(inner / "c") == 5
    assert taken_bytes(tmp_path / "nothing") is None
