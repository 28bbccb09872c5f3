"""Pixels are to the bit those of Transformers' processors of Pillow: on photographs, and pictures of every kind."""

import functools
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from moe_jax.images.decoding import decode_picture
from moe_jax.images.processing import pixels_of, read_processing
from tests.support.tiers import EVERY

transformers = pytest.importorskip("transformers")
from transformers.image_transforms import convert_to_rgb  # noqa: E402


@functools.cache
def processors():
    """CLIP's for pictures of 336 pixels, and SigLIP's for 384, as LLaVA models have them."""
    clip = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    return {
        "clip": transformers.CLIPImageProcessorPil(**clip),
        "siglip": transformers.SiglipImageProcessorPil(size={"height": 384, "width": 384}),
    }


def check(data: bytes, name: str, *, pad: bool) -> None:
    """Compares the pixels of a picture, which Transformers gets as it opens it itself."""
    processor = processors()[name]
    processing = read_processing(json.loads(processor.to_json_string()), pad=pad)
    theirs = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    theirs = Image.fromarray(np.asarray(convert_to_rgb(theirs, return_numpy=True)))
    if pad:
        side = max(theirs.size)
        square = Image.new("RGB", (side, side), tuple(int(mean * 255) for mean in processing.mean))
        square.paste(theirs, ((side - theirs.width) // 2, (side - theirs.height) // 2))
        theirs = square
    expected = processor(theirs, do_rescale=False, do_normalize=False)["pixel_values"][0]
    found = pixels_of(decode_picture(data, "x"), processing)
    np.testing.assert_array_equal(found, np.moveaxis(expected, 0, -1), strict=True)


PHOTOGRAPHS = {
    "skimage/data": (
        *("astronaut.png", "camera.png", "cell.png", "chelsea.png", "coffee.png", "coins.png"),
        *("hubble_deep_field.jpg", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
    ),
    "sklearn/datasets/images": ("china.jpg", "flower.jpg"),
}


def photographs() -> list[Path]:
    """Photographs that scikit-image and scikit-learn bring, where they are installed."""
    found: list[Path] = []
    for place, names in PHOTOGRAPHS.items():
        package, _, folder = place.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found += [Path(spec.origin).parent / folder / name for name in names]
    return found


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_pixels_of_photographs_are_those_of_transformers(name, pad):
    found = photographs()
    if not found:
        pytest.skip("neither scikit-image nor scikit-learn is here, which have photographs")
    for file in found:
        check(file.read_bytes(), name, pad=pad)


def drawn(random: np.random.Generator) -> bytes:
    """A file of a random size, mode and format, some turned by EXIF."""
    sides = [int(side) for side in np.exp(random.uniform(0, np.log(700), 2))]
    noise = random.integers(0, 256, (*[max(1, side // 4) for side in sides], 4), np.uint8)
    picture = Image.fromarray(noise, "RGBA").resize((sides[1], sides[0]), Image.Resampling.BILINEAR)
    mode, kind = [
        *(("RGB", "PNG"), ("RGBA", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("1", "PNG")),
        *(("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "WEBP"), ("RGBA", "WEBP")),
        *(("P", "GIF"), ("RGB", "BMP"), ("RGB", "TIFF"), ("CMYK", "TIFF")),
    ][random.integers(0, 15)]
    picture = picture.convert("RGB").quantize(32) if mode == "P" else picture.convert("RGB" if mode == "1" else mode)
    options = {}
    if kind == "JPEG" and random.integers(0, 2):
        exif = Image.Exif()
        exif[0x0112] = int(random.integers(1, 9))
        options["exif"] = exif
    file = io.BytesIO()
    picture.convert("1" if mode == "1" else picture.mode).save(file, kind, **options)
    return file.getvalue()


def test_pixels_of_random_pictures_are_those_of_transformers():
    random = np.random.default_rng(0)
    for number in range(200 if EVERY else 20):
        check(drawn(random), ("clip", "siglip")[number % 2], pad=bool(number // 2 % 2))
