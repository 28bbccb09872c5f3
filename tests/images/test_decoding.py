"""Pictures are decoded as Transformers sees them, within bounds; what is none is one line."""

import io
import struct
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
