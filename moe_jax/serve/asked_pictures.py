"""Pictures in requests: in data URLs, or by names inside of a folder that the server was given; nothing is fetched."""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moe_jax.core.errors import InputError, clipped, shown
from moe_jax.generation.eye import SeenPicture
from moe_jax.images.decoding import MAX_BYTES, decode_picture
from moe_jax.images.feature_cache import digest_of
from moe_jax.images.picture_files import PictureFolder
from moe_jax.images.processing import pixels_of
from moe_jax.images.slots import PlacedRow, place_pictures
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import tokens_per_picture
from moe_jax.serve.protocol_error import ProtocolError

MOST_PICTURES = 16
"""Pictures of a request."""
_DATA_URL = re.compile(r"data:image/[\w.+-]{1,64};base64,")
_NO_TOKEN = -1  # as of `Tokenizer.encode`


class AskedPicture(NamedTuple):
    """A picture of a request: a data URL, or a name; and where it stands in the request."""

    url: str
    where: str


def asked_picture(value: Any, where: str) -> AskedPicture:
    """Returns the picture of a part, `{"url": ...}` or a URL; raises `ProtocolError` with status 400 if it is none."""
    if isinstance(value, Mapping):
        detail = value.get("detail")
        if detail not in (None, "auto", "low", "high"):
            raise _refused(where, f"detail is {shown(detail)}, expected auto, low or high")
        value = value.get("url")
    if not isinstance(value, str) or not value:
        raise _refused(where, f"it is {shown(value)}, expected an object with url")
    return AskedPicture(value, where)


class PictureReader:
    """Reads the pictures of requests for one model, in any thread.

    Args:
      config: of a model that sees.
      folder: that names of pictures are inside of; None: no names are taken.

    Attributes:
      placeholder: the token that stands for a picture; None: the model has none.
    """

    def __init__(self, config: ModelConfig, folder: PictureFolder | None = None):
        vision = config.check_sees("pictures in requests")
        self.placeholder = vision.placeholder
        self._processing, self._each, self._folder = (
            vision.processing,
            tokens_per_picture(vision, config.d_model),
            folder,
        )

    def place(self, ids: Sequence[int], pictures: int) -> PlacedRow:
        """Makes room for pictures in a prompt, where an id stands for each, as `place_pictures`."""
        placeholder = _NO_TOKEN if self.placeholder is None else self.placeholder
        (row,) = place_pictures([ids], pictures, placeholder=placeholder, per_picture=self._each)
        return row

    def read(self, picture: AskedPicture) -> SeenPicture:
        """Returns a picture as the model sees it; raises `ProtocolError` with status 400 if it cannot be read."""
        data = self._bytes_of(picture)
        try:
            return SeenPicture(
                digest_of(data).tobytes(), pixels_of(decode_picture(data, "the picture"), self._processing)
            )
        except InputError as error:
            raise _refused(picture.where, str(error)) from None

    def _bytes_of(self, picture: AskedPicture) -> bytes:
        url, where = picture
        address = _DATA_URL.match(url)
        if address is not None:
            content = url[address.end() :]
            if len(content) > MAX_BYTES * 4 // 3 + 4:  # before it is decoded
                raise _refused(where, f"it has more than the {MAX_BYTES >> 20} MB of a picture")
            try:
                return base64.b64decode(content, validate=True)
            except (binascii.Error, ValueError) as error:
                raise _refused(where, f"it is not base64: {error}") from None
        if self._folder is None or ":" in url[:64]:
            names = "" if self._folder is None else ", or the name of a picture in the server's folder"
            told = f"{clipped(url)} is not fetched or read here; expected data:image/...;base64,...{names}"
            raise _refused(where, told)
        try:
            return self._folder.read(url)
        except FileNotFoundError:
            raise _refused(where, f"there is no picture {shown(url)} in the server's folder") from None
        except InputError as error:
            # Where the server's files are is nobody's business.
            raise _refused(where, str(error).replace(f"{self._folder.path}", "the server's folder")) from None


def _refused(where: str, problem: str) -> ProtocolError:
    return ProtocolError(400, f"{where}: {problem}", param="messages", code="invalid_image")
