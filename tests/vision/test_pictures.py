"""Bad pictures do no harm: names that lead out of a folder, files that are none, and bytes that were changed."""

import io
import os
import signal
import socket

import numpy as np
import pytest
from PIL import Image

from moe_jax.core.errors import InputError
from moe_jax.images import decoding
from moe_jax.images.decoding import FORMATS, MAX_BYTES, decode_picture
from moe_jax.images.picture_files import PictureFolder, read_picture
from tests.support.tiers import long

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 33, 3), np.uint8)
# Smooth as photographs are, so that coders with transforms have something to do.
SMOOTH = Image.fromarray(PIXELS).resize((60, 44), Image.Resampling.BICUBIC)


def written(kind, **options) -> bytes:
    file = io.BytesIO()
    SMOOTH.save(file, kind, **options)
    return file.getvalue()


KINDS = {
    **{kind: written(kind) for kind in FORMATS},
    "progressive": written("JPEG", progressive=True),
    "lossless": written("WEBP", lossless=True),
    "lzw": written("TIFF", compression="tiff_lzw"),
    "deflate": written("TIFF", compression="tiff_adobe_deflate"),
}


@pytest.fixture
def folder(tmp_path):
    """A folder of pictures with links, beside a picture that is none of them."""
    inside = tmp_path / "pictures"
    (inside / "deep").mkdir(parents=True)
    (inside / "one.png").write_bytes(KINDS["PNG"])
    (inside / "deep" / "two.jpg").write_bytes(KINDS["JPEG"])
    (tmp_path / "secret.png").write_bytes(KINDS["PNG"])
    (inside / "near").symlink_to("deep")
    (inside / "near.png").symlink_to("deep/../one.png")
    (inside / "out").symlink_to("..")
    (inside / "out.png").symlink_to("../secret.png")
    (inside / "far.png").symlink_to(tmp_path / "secret.png")
    (inside / "chain.png").symlink_to("out/secret.png")
    (inside / "loop").symlink_to("loop")
    (inside / "nothing.png").symlink_to("missing.png")
    return inside


@pytest.mark.parametrize("name", ["one.png", "./one.png", "deep/two.jpg", "near/two.jpg", "near.png", "deep//two.jpg"])
def test_pictures_inside_of_a_folder_are_read(folder, name):
    assert PictureFolder(folder).picture(name).shape == (44, 60, 3)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("../secret.png", "'..'"),
        ("deep/../../secret.png", "'..'"),
        ("deep/../one.png", "'..'"),
        ("/etc/hostname", "absolute"),
        ("out/secret.png", "leads out of"),
        ("out.png", "leads out of"),
        ("far.png", "leads out of"),
        ("chain.png", "leads out of"),
        ("out/pictures/../secret.png", "'..'"),
        ("deep", "a directory"),
        (".", "a directory"),
        ("", "no name"),
        ("one\0.png", "no name"),
        ("x" * 5000, "no name"),
        ("x" * 300, "cannot be read"),
        ("one.png/more", "cannot be read"),
        ("loop", "a link"),
        (7, "no name"),
    ],
)
def test_no_name_leads_out_of_a_folder(folder, name, named):
    pictures = PictureFolder(folder)
    with pytest.raises((InputError, OSError)) as error:
        pictures.picture(name)
    assert isinstance(error.value, InputError) and named in str(error.value)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["missing.png", "deep/missing.png", "nothing.png", "missing/one.png"])
def test_a_missing_picture_is_one_line(folder, name):
    with pytest.raises(FileNotFoundError) as error:
        PictureFolder(folder).picture(name)
    assert str(error.value) == f"no picture at {folder}/{name}"


def test_the_folder_stays_the_one_that_was_opened(folder):
    pictures = PictureFolder(folder)
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    (folder / "one.png").write_bytes(b"another")
    assert pictures.picture("one.png").shape == (44, 60, 3)


def test_what_becomes_a_link_between_two_looks_is_not_followed(folder, monkeypatch):
    pictures, realpath = PictureFolder(folder), os.path.realpath

    def changed(path):
        found = realpath(path)
        if str(path).endswith("two.jpg") and not (folder / "deep").is_symlink():
            (folder / "deep").rename(folder / "gone")
            (folder / "deep").symlink_to(folder.parent)
            (folder.parent / "two.jpg").write_bytes(KINDS["PNG"])
        return found

    monkeypatch.setattr(os.path, "realpath", changed)
    with pytest.raises(InputError, match="cannot be read"):
        pictures.picture("deep/two.jpg")


def test_files_that_never_end_are_not_opened(folder, monkeypatch):
    os.mkfifo(folder / "pipe.png")
    monkeypatch.chdir(folder)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket.png")
        for name, named in (("pipe.png", "a pipe"), ("socket.png", "a socket")):
            for read in (PictureFolder(folder).picture, lambda name: read_picture(folder / name)):
                with pytest.raises(InputError, match=named):
                    read(name)
    with pytest.raises(InputError, match="a device"):
        read_picture("/dev/zero")


def test_bytes_are_counted_before_they_are_read(folder):
    with (folder / "large.png").open("wb") as file:
        file.write(KINDS["PNG"])
        file.truncate(MAX_BYTES + 1)  # a hole: no bytes on the disk
    for read in (PictureFolder(folder).picture, lambda name: read_picture(folder / name)):
        with pytest.raises(InputError, match=r"more than 33,554,432 bytes"):
            read("large.png")


def damaged(data: bytes, random: np.random.Generator) -> bytes:
    """Bytes of a picture with some flipped, taken out, put in twice, or cut off."""
    found = bytearray(data)
    for _ in range(random.integers(1, 6)):
        at = int(random.integers(0, max(1, len(found))))
        kind = random.integers(0, 5)
        if kind == 0:
            found[at : at + 1] = bytes([random.integers(0, 256)])
        elif kind == 1:
            found[at : at + 4] = random.integers(0, 2**32, dtype=np.uint32).tobytes()  # a size, perhaps
        elif kind == 2:
            del found[at : at + int(random.integers(1, 30))]
        elif kind == 3:
            found[at:at] = found[at : at + int(random.integers(1, 60))]
        elif random.integers(0, 3) == 0:
            del found[at:]
        else:  # headers say what is allocated
            found[int(random.integers(0, min(64, max(1, len(found)))))] = 255
    return bytes(found)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_bytes_are_a_picture_or_one_line_and_nothing_else(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 4_000_000)  # what a header says is taken at its word up to here
    random, refused, each = np.random.default_rng(len(kind)), 0, 100
    signal.alarm(120)  # a decoder that hangs ends the tests
    try:
        for _ in range(each):
            data = damaged(KINDS[kind], random)
            try:
                decoded = decode_picture(data, "x")
                assert decoded.dtype == np.uint8 and decoded.ndim == 3 and decoded.shape[2] == 3 and decoded.size
            except InputError as error:
                refused += 1
                assert "\n" not in str(error) and str(error).startswith("x") and len(str(error)) < 500
    finally:
        signal.alarm(0)
    assert 0 < refused and not list(tmp_path.iterdir())
    assert capfd.readouterr().out == ""


@long
def test_random_bytes_with_a_first_line_of_a_format_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(5)
    for data in KINDS.values():
        for length in (1, 4, 8, 12, 16, 24, 32, 64):
            noise = data[:length] + random.integers(0, 256, 2000, np.uint8).tobytes()
            try:
                decode_picture(noise, "x")
            except InputError as error:
                assert "\n" not in str(error)
    assert not list(tmp_path.iterdir())
