"""Finds out, from headers alone, whether a file holds more than the one picture that is taken of it."""

from PIL import Image

# Of a GIF of common blocks, of 255 bytes, so many are more than the bytes that a picture may have.
_MOST_BLOCKS = 200_000
_IMAGE, _EXTENSION = 0x2C, 0x21


def has_more_frames(picture: Image.Image, data: bytes) -> bool:
    """Returns whether there are further frames or pages behind the first one; false where that is not to be seen.

    Args:
      picture: opened and not yet read.
      data: the bytes of its file.
    """
    if picture.format == "GIF":
        return _gif_has_more(data)
    # Those behind a photograph, in one JPEG, are smaller copies of it or another eye's.
    if picture.format == "MPO":
        return False
    # Of a TIFF, this is whether its first page names another, and chains of pages are not followed; of WebP and PNG, a
    # number in their headers.
    return bool(getattr(picture, "is_animated", False))


def _gif_has_more(data: bytes) -> bool:
    """Whether a second image begins in a GIF; false if it breaks off, or has more blocks than any honest one."""
    try:
        at, images, left = 13 + _colours(data[10]), 0, _MOST_BLOCKS
        while left > 0:
            left -= 1
            if data[at] == _IMAGE:
                images += 1
                if images > 1:
                    return True
                at += 11 + _colours(data[at + 9])
            elif data[at] == _EXTENSION:
                at += 2
            else:  # the end, or bytes of no kind
                return False
            while data[at] and left > 0:
                at, left = at + 1 + data[at], left - 1
            at += 1
    except IndexError:
        pass
    return False


def _colours(flags: int) -> int:
    """Returns the bytes of the table of colours that flags announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
