"""Pictures in requests: in data URLs, or by names inside of a folder that the server was given; nothing is fetched."""

from collections.abc import Sequence
from typing import Any

from moe_jax.core.errors import InputError, shown
from moe_jax.data.pictures.picture_sources import PictureSource, picture_of
from moe_jax.generation.eye import SeenPicture
from moe_jax.images.decoding import decode_picture
from moe_jax.images.feature_cache import digest_of
from moe_jax.images.picture_files import PictureFolder
from moe_jax.images.processing import pixels_of
from moe_jax.images.slots import PlacedRow, place_pictures
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import tokens_per_picture
from moe_jax.serve.protocol_error import ProtocolError

MOST_PICTURES = 16
"""Pictures of a request."""
_NO_TOKEN = -1  # as of `Tokenizer.encode`


def asked_picture(value: Any, where: str) -> PictureSource:
    """Returns the picture of a part, as `picture_of`, which knows where it stands."""
    return picture_of(value, where)._replace(where=where)


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
        self.placeholder, self._processing, self._folder = vision.placeholder, vision.processing, folder
        self._each = tokens_per_picture(vision, config.d_model)

    def place(self, ids: Sequence[int], pictures: int) -> PlacedRow:
        """Makes room for pictures in a prompt, where an id stands for each, as `place_pictures`."""
        placeholder = _NO_TOKEN if self.placeholder is None else self.placeholder
        (row,) = place_pictures([ids], pictures, placeholder=placeholder, per_picture=self._each)
        return row

    def read(self, picture: PictureSource) -> SeenPicture:
        """Returns a picture as the model sees it; raises `ProtocolError` with status 400 if it cannot be read."""
        try:
            data = self._bytes_of(picture)
            pixels = pixels_of(decode_picture(data, "the picture"), self._processing)
        except InputError as error:
            problem = str(error)
            if self._folder is not None:  # where the server's files are is nobody's business
                problem = problem.replace(f"{self._folder.path}", "the server's folder")
            raise ProtocolError(400, f"{picture.where}: {problem}", param="messages", code="invalid_image") from None
        return SeenPicture(digest_of(data).tobytes(), pixels)

    def _bytes_of(self, picture: PictureSource) -> bytes:
        if picture.data is not None:
            return picture.data
        assert picture.name is not None, "a picture that is not held is named"
        if self._folder is None:
            raise InputError(f"{picture.shown} is no picture; expected data:image/...;base64,...")
        try:
            return self._folder.read(picture.name)
        except FileNotFoundError:
            raise InputError(f"there is no picture {shown(picture.name)} in the server's folder") from None
