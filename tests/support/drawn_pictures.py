"""Files of pictures of random pixels, and a folder with some and a tokenizer over bytes."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.byte_tokenizer import byte_tokenizer


def png(number: int, size: tuple[int, int] = (20, 15)) -> bytes:
    """The bytes of a PNG of this width and height, another one for every number."""
    out = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def picture_shop(folder: Path, count: int = 8) -> Path:
    """Fills a folder with `shop/0.png` and so on, and with a tokenizer that names its EOS."""
    (folder / "shop").mkdir()
    for number in range(count):
        (folder / "shop" / f"{number}.png").write_bytes(png(number))
    byte_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder
