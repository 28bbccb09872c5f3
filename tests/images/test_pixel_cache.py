"""Pixels in a folder: the same as made anew, of the right picture, in bounds."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from moe_jax.core.errors import InputError
from moe_jax.files import bounded_folder
from moe_jax.images import pixel_cache
from moe_jax.images.decoding import decode_picture
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.pixel_cache import PixelCache
from moe_jax.images.processing import pixels_of

SMALL = ImageProcessing(size=(8, 8), shortest=8)


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (11, 9, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_kept_pixels_are_those_that_are_made(tmp_path, monkeypatch):
    cache, data = PixelCache(tmp_path / "new", max_bytes=10**6), picture(0)
    expected = pixels_of(decode_picture(data, "x"), SMALL)
    np.testing.assert_array_equal(cache.pixels(data, "x", SMALL), expected)
    monkeypatch.setattr(pixel_cache, "decode_picture", lambda *_, **__: pytest.fail("decoded twice"))
    np.testing.assert_array_equal(PixelCache(tmp_path / "new", max_bytes=10**6).pixels(data, "x", SMALL), expected)


def test_another_picture_and_another_processing_have_their_own(tmp_path):
    cache, padded = PixelCache(tmp_path, max_bytes=10**6), ImageProcessing(size=(8, 8), shortest=8, pad=True)
    for data, processing in ((picture(0), SMALL), (picture(1), SMALL), (picture(0), padded)):
        expected = pixels_of(decode_picture(data, "x"), processing)
        np.testing.assert_array_equal(cache.pixels(data, "same name", processing), expected)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:40] + bytes([b[40] ^ 1]) + b[41:], lambda b: b""])
def test_a_damaged_file_is_made_anew(tmp_path, damage):
    cache, data = PixelCache(tmp_path, max_bytes=10**6), picture(0)
    expected = cache.pixels(data, "x", SMALL)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    np.testing.assert_array_equal(cache.pixels(data, "x", SMALL), expected)
    np.testing.assert_array_equal(cache.pixels(data, "x", SMALL), expected)


def test_the_folder_stays_within_its_bytes_and_keeps_what_is_used(tmp_path):
    room = 10 * (8 * 8 * 3 + 32)
    cache, often = PixelCache(tmp_path, max_bytes=room), picture(0)
    (tmp_path / "killed.part").touch()
    os.utime(tmp_path / "killed.part", (0, 0))
    for seed in range(1, 60):
        cache.pixels(often, "often", SMALL)
        cache.pixels(picture(seed), "once", SMALL)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= room * (1 + 1 / 16) + 224
    assert (tmp_path / f"{pixel_cache._key(often, SMALL)}.pixels").exists()
    assert not (tmp_path / "killed.part").exists()


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    cache = PixelCache(tmp_path, max_bytes=10**6)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bounded_folder.os, "replace", full)
    np.testing.assert_array_equal(
        cache.pixels(picture(0), "x", SMALL), pixels_of(decode_picture(picture(0), "x"), SMALL)
    )
    assert not list(tmp_path.iterdir())


def test_damaged_pictures_are_not_kept(tmp_path):
    with pytest.raises(InputError, match="damaged"):
        PixelCache(tmp_path, max_bytes=10**6).pixels(picture(0)[:-60], "x", SMALL)
    assert not list(tmp_path.iterdir())
