"""Decodes pictures of known formats within bounds of bytes and pixels; nothing else ever reaches a decoder."""

import io
import warnings
from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from moe_jax.core.errors import InputError
from moe_jax.images.frames import has_more_frames

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""As Pillow names them. SVG, PDF and EPS are programs, and are not among them."""
MAX_BYTES = 32 * 2**20
MAX_PIXELS = 40_000_000

# Of damaged metadata; and of sizes, for which there is a bound here. For good, as all threads share these filters.
warnings.filterwarnings("ignore", module=r"PIL\.")

_WHITE = (255, 255, 255, 255)


def decode_picture(
    data: bytes, name: str, *, remark: Callable[[str], None] | None = None
) -> UInt8[np.ndarray, "H W 3"]:
    """Decodes a picture: upright as its EXIF orientation says, over white where it is transparent, the first frame.

    Of grey of 16 bits, as radiographs often are, the upper eight count.

        >>> import io; from PIL import Image; from moe_jax.images.decoding import decode_picture
        >>> file = io.BytesIO(); Image.new("RGB", (4, 2), (9, 8, 7)).save(file, "PNG")
        >>> decode_picture(file.getvalue(), "x.png").shape
        (2, 4, 3)

    Args:
      data: the bytes of the file.
      name: of the file, for messages.
      remark: takes a line that says so, if there are more frames than the first one.

    Raises:
      InputError: more than `MAX_BYTES` (before anything is read of it) or, by its header, `MAX_PIXELS` (before memory
        is taken for them); none of `FORMATS`; truncated or damaged.
    """
    if len(data) > MAX_BYTES:
        raise InputError(f"{name}: {len(data) / 2**20:,.0f} MB are more than the {MAX_BYTES // 2**20} MB of a picture")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        if picture.width * picture.height > MAX_PIXELS:
            size = f"{picture.width:,} x {picture.height:,} pixels"
            raise InputError(f"{name}: {size} are more than the {MAX_PIXELS // 10**6} million of a picture")
        more = remark is not None and has_more_frames(picture, data)
        pixels = pixels_in(picture, name)
    except Image.DecompressionBombError:
        raise InputError(f"{name}: its pixels are more than the {MAX_PIXELS // 10**6} million of a picture") from None
    except UnidentifiedImageError:
        raise InputError(f"{name} is not a picture that can be read; expected {', '.join(FORMATS)}") from None
    except InputError:
        raise
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        raise InputError(f"{name} is a damaged picture: {error or type(error).__name__}") from None
    if remark is not None and more:
        remark(f"{name} has more than one frame; the first one is taken")
    return pixels


def pixels_in(picture: Image.Image, name: str) -> UInt8[np.ndarray, "H W 3"]:
    """Returns what `decode_picture` does, of a picture that is open already.

    Raises `InputError`, which names the picture, for numbers of 32 bits: what is black and white is not said.
    """
    return np.asarray(_opaque(ImageOps.exif_transpose(picture), name))


def _opaque(picture: Image.Image, name: str) -> Image.Image:
    if picture.mode.startswith("I") or picture.mode == "F":
        grey = np.asarray(picture)
        if picture.mode == "F" or grey.min() < 0 or grey.max() >= 1 << 16:
            raise InputError(f"{name} has pixels of 32 bits, whose black and white are not known; save it with 8 bits")
        return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")  # Pillow would make white of nearly all
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, _WHITE), picture)
    return picture.convert("RGB")
