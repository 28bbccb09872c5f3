"""Pictures are decoded as Transformers sees them, within bounds; what is none is one line."""

import contextlib
import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from moe_jax.core.errors import InputError
from moe_jax.images import decoding
from moe_jax.images.decoding import FORMATS, decode_picture

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 14, 4), np.uint8)
RGB = Image.fromarray(PIXELS[..., :3])


def written(picture: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def pictures() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    clear = RGB.quantize(16)
    clear.info["transparency"] = 3
    return {
        "png": written(RGB, "PNG"),
        "alpha": written(Image.fromarray(PIXELS, "RGBA"), "PNG"),
        "grey": written(RGB.convert("L"), "PNG"),
        "grey and alpha": written(Image.fromarray(PIXELS, "RGBA").convert("LA"), "PNG"),
        "palette": written(RGB.quantize(16), "PNG"),
        "clear colour": written(clear, "PNG", transparency=3),
        "one bit": written(RGB.convert("1"), "PNG"),
        "jpeg": written(RGB, "JPEG"),
        "cmyk": written(RGB.convert("CMYK"), "JPEG"),
        "turned": written(RGB, "JPEG", exif=exif),
        "webp": written(RGB, "WEBP"),
        "gif": written(RGB, "GIF", save_all=True, append_images=[RGB.rotate(180)]),
        "bmp": written(RGB, "BMP"),
        "tiff": written(RGB, "TIFF"),
    }


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_of_grey_of_16_bits_the_upper_ones_count(kind):
    """Radiographs are such; Pillow would make white of all from 256 on."""
    grey = np.arange(0, 1 << 16, 257, dtype=np.uint16).reshape(16, 16)
    data = written(Image.fromarray(grey), kind)
    expected = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    np.testing.assert_array_equal(decode_picture(data, "x"), expected)


def test_numbers_whose_black_and_white_are_not_known_are_refused():
    for numbers in (np.ones((3, 4), np.float32), np.full((3, 4), 1 << 20, np.int32)):
        with pytest.raises(InputError, match="x.tiff has pixels"):
            decode_picture(written(Image.fromarray(numbers), "TIFF"), "x.tiff")


@pytest.mark.parametrize("name", pictures())
def test_pixels_are_those_that_transformers_sees(name):
    pytest.importorskip("transformers")
    from PIL import ImageOps
    from transformers.image_transforms import convert_to_rgb

    data = pictures()[name]
    theirs = convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_numpy=True)
    ours = decode_picture(data, name)
    np.testing.assert_array_equal(ours, theirs, strict=True)
    assert ours.shape == ((14, 9, 3) if name == "turned" else (9, 14, 3))


def lying_png(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises more."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
        (b"%PDF-1.4\n", "not a picture"),
        (written(RGB, "PPM"), "not a picture"),
        (written(RGB, "PNG")[:60], "damaged"),
        (written(RGB, "JPEG")[:300], "damaged"),
        (lying_png(100, 100), "damaged"),
        (lying_png(0, 5), "x.png"),
        (lying_png(100_000, 401), "40 million"),
        (b"\x89PNG\r\n\x1a\n" + bytes(33 * 2**20), "32 MB"),
    ],
)
def test_what_is_no_picture_is_one_line(data, named):
    with pytest.raises(InputError) as error:
        decode_picture(data, "x.png")
    assert str(error.value).startswith("x.png") and named in str(error.value) and "\n" not in str(error.value)


def test_pixels_are_counted_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", None)
    with pytest.raises(InputError, match="40 million"):
        decode_picture(lying_png(2**30, 2**30), "x.png")


def test_damaged_bytes_are_a_picture_or_one_line():
    random, refused, tried = np.random.default_rng(1), 0, 0
    for data in pictures().values():
        for _ in range(40):
            damaged = bytearray(data)
            for place in random.integers(0, len(data), 4):
                damaged[place] = random.integers(0, 256)
            tried += 1
            try:
                decoded = decode_picture(bytes(damaged), "x")
                assert decoded.dtype == np.uint8 and decoded.shape[2] == 3
            except InputError as error:
                refused += 1
                assert "\n" not in str(error)
    assert 0.2 * tried < refused < tried


def test_the_formats_are_those_that_are_said():
    assert FORMATS == ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF") and decoding.MAX_BYTES == 32 * 2**20


SECOND = Image.fromarray(PIXELS[..., :3][::-1])
FRAMES = {
    "gif": ("GIF", {"save_all": True}),
    "gif with a table of colours for each": ("GIF", {"save_all": True, "comment": b"x" * 600, "disposal": 2}),
    "webp": ("WEBP", {"save_all": True, "lossless": True}),
    "png": ("PNG", {"save_all": True}),
    "tiff": ("TIFF", {"save_all": True}),
    "large tiff": ("TIFF", {"save_all": True, "big_tiff": True}),
}


@pytest.mark.parametrize("name", FRAMES)
def test_more_frames_than_the_first_are_said(name):
    kind, options = FRAMES[name]
    said: list[str] = []
    data = written(RGB, kind, append_images=[SECOND], **options)
    pixels = decode_picture(data, "x", remark=said.append)
    assert len(said) == 1 and said[0].startswith("x ") and "\n" not in said[0]
    one = written(RGB, kind, **options)
    np.testing.assert_array_equal(pixels, decode_picture(one, "x", remark=said.append))
    assert len(said) == 1
    if kind == "GIF":  # a file that breaks off in its second frame
        first = data.rindex(b"\x2c", 0, len(data) - 60)
        np.testing.assert_array_equal(decode_picture(data[: first + 1], "x", remark=said.append), pixels)


def test_pictures_of_one_frame_are_not_remarked_on():
    said: list[str] = []
    for name, data in pictures().items():
        decode_picture(data, name, remark=said.append)
        assert bool(said) == (name == "gif"), name
        said.clear()


def test_a_photograph_with_a_small_copy_behind_it_is_one_picture():
    said: list[str] = []
    both = written(RGB, "MPO", save_all=True, append_images=[RGB.resize((4, 4))])
    pixels = decode_picture(both, "x", remark=said.append)
    np.testing.assert_array_equal(pixels, decode_picture(written(RGB, "JPEG"), "x"))
    assert Image.open(io.BytesIO(both)).format == "MPO" and not said


def pages_in_a_ring() -> bytes:
    """A TIFF whose last page names the first as the one behind it."""
    data = bytearray(written(RGB, "TIFF", save_all=True, append_images=[SECOND]))
    at = (first := struct.unpack("<I", data[4:8])[0])
    while True:
        (count,) = struct.unpack("<H", data[at : at + 2])
        place = at + 2 + 12 * count
        (behind,) = struct.unpack("<I", data[place : place + 4])
        if behind == 0:
            data[place : place + 4] = struct.pack("<I", first)
            return bytes(data)
        at = behind


def gif_of_many_blocks() -> bytes:
    """A GIF whose one image has its bytes in blocks of one byte each, and more of them than fit its pixels."""
    data = written(RGB.quantize(4), "GIF")
    at = data.index(b"\x2c")
    begins = at + 11 + (3 << ((data[at + 9] & 7) + 1) if data[at + 9] & 0x80 else 0)
    return data[:begins] + b"\x01\x00" * 3_000_000 + b"\x00" + data[at:]


def test_hostile_files_do_not_make_the_search_for_frames_long(monkeypatch):
    said: list[str] = []
    decode_picture(pages_in_a_ring(), "x", remark=said.append)
    assert len(said) == 1  # of the second page; the ring is not walked through
    looks, search = [], decoding.has_more_frames

    def timed(picture, data):
        begun = time.process_time()
        found = search(picture, data)
        looks.append(time.process_time() - begun)
        return found

    monkeypatch.setattr(decoding, "has_more_frames", timed)
    with contextlib.suppress(InputError):
        decode_picture(gif_of_many_blocks(), "x", remark=said.append)
    assert len(looks) == 1 and looks[0] < 1 and len(said) == 1


def test_damaged_frames_are_a_remark_or_none():
    random, remarks, tried = np.random.default_rng(2), 0, 0
    for kind, options in FRAMES.values():
        data = written(RGB, kind, append_images=[SECOND], **options)
        for _ in range(30):
            damaged = bytearray(data)
            for place in random.integers(0, len(data), 4):
                damaged[place] = random.integers(0, 256)
            said: list[str] = []
            tried += 1
            try:
                decode_picture(bytes(damaged), "x", remark=said.append)
                remarks += len(said)
                assert len(said) <= 1
            except InputError:
                assert not said
    assert 0 < remarks < tried
