"""Pictures that rows of data name or hold: where each comes from, read and made pixels only when they are needed."""

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, clipped, shown
from moe_jax.images.decoding import MAX_BYTES
from moe_jax.images.picture_files import PictureFolder, shown_name

T = TypeVar("T")

MARK = "<image>"
"""Stands for a picture in the texts of data, whatever token a model has for it."""

MARKS_OF_OTHERS = ("<video>", "<audio>", "<Image>", "[IMG]")
"""Marks of other forms of data, of which a row with pictures may have none: they would be learnt as text."""

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
# The first bytes of PNG, JPEG, GIF, WebP, BMP and TIFF in base64. `/` is in its alphabet, and a full stop is not.
_BASE64 = re.compile(r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk|SUkqA|TU0A)[A-Za-z0-9+/\s]+={0,2}\s*")
_LEAST_BASE64 = 60  # characters; a smaller picture is none
_ROW_KEYS = ("image", "images")
MOST_OF_ROW = 4096
"""Pictures of a row at most: as tokens, more of them would take memory before it is known that they do not fit."""


class PictureSource(NamedTuple):
    """A picture of a row of data.

    Attributes:
      name: inside of the folder of pictures; None: its bytes are in the row.
      data: the bytes of its file; None: they are in the folder.
      where: the row, for messages.
      beside: the folder of the file that has the row.
    """

    name: str | None
    data: bytes | None
    where: str = ""
    beside: Path | None = None

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return shown_name(self.name) if self.name else "a picture in the row"


ANY_PICTURE = PictureSource(None, b"")
"""Stands for a picture where only the number of them counts."""


class PictureFiles:
    """Reads the bytes of pictures; folders are opened when the first picture of one is read.

    Args:
      folder: that names of pictures are inside of; None: the folder of the file whose rows name them.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._opened: dict[Path, PictureFolder] = {}
        if folder is not None:
            self._opened[folder] = PictureFolder(folder)

    def read(self, picture: PictureSource) -> bytes:
        """Returns the bytes of a picture's file, at most `MAX_BYTES`.

        Raises:
          BadDocument: with the place of the row, if there is none, its name leads out of the folder, or it is too
            large.
        """
        if picture.data is not None:
            return picture.data
        return self._used(picture, lambda folder, name: folder.read(name))

    def check(self, picture: PictureSource) -> None:
        """Raises `BadDocument` if there is no picture of this name; reads nothing."""
        if picture.data is None:
            self._used(picture, lambda folder, name: folder.check(name))

    def _used(self, picture: PictureSource, use: Callable[[PictureFolder, str], T]) -> T:
        assert picture.name is not None
        folder = picture.beside if self.folder is None else self.folder
        assert folder is not None, "the file of the row lies in a folder"
        try:
            if folder not in self._opened:
                self._opened[folder] = PictureFolder(folder)
            return use(self._opened[folder], picture.name)
        except FileNotFoundError as error:
            told = "" if self.folder is not None else "; image_folder says which folder names are inside of"
            raise BadDocument(f"{picture.where}: {error}{told}") from None
        except InputError as error:
            raise BadDocument(f"{picture.where}: {error}") from None


def check_places(pictures: int, places: int, where: str, told: str = "") -> None:
    """Raises `InputError` unless there are as many places for pictures in a text as pictures; `told` is added to it."""
    if pictures != places:
        raise InputError(
            f"pictures of the row: {pictures}, and places for them in {where}: {places}; expected one for each{told}"
        )


def pictures_of_row(row: Mapping[str, Any], key: str | None = None) -> list[PictureSource]:
    """Returns the pictures beside the content of a row: under `image` or `images`, or under the key that is given.

    Each is a name, a data URL, base64, or an object with `bytes` or `path`, as tables of Hugging Face have it; or there
    is a list of them.

    Raises:
      InputError: for anything else, addresses on the network, and more than `MOST_OF_ROW`.
    """
    keys = _ROW_KEYS if key is None else (key,)
    given = [(name, row[name]) for name in keys if row.get(name) not in (None, "", []) and not _is_null(row[name])]
    if len(given) > 1:
        raise InputError(f"both {shown(given[0][0])} and {shown(given[1][0])} hold pictures; one of them is expected")
    if not given:
        return []
    name, value = given[0]
    many = value if isinstance(value, list) else [value]
    if len(many) > MOST_OF_ROW:
        raise InputError(f"{shown(name)} holds {len(many):,} pictures; at most {MOST_OF_ROW:,} are read of a row")
    return [picture_of(one, shown(name)) for one in many]


def picture_of(value: Any, what: str) -> PictureSource:
    """Returns the picture that a value names or holds; `what` says where the value stands.

    Raises:
      InputError: as `pictures_of_row`.
    """
    if isinstance(value, Mapping):
        if value.get("url") is not None:  # OpenAI's
            return picture_of(value["url"], what)
        if value.get("bytes") is not None:
            value = value["bytes"]
        elif value.get("path") is not None:
            value = value["path"]
    if isinstance(value, bytes):
        return PictureSource(None, value)
    if not isinstance(value, str) or not value:
        raise InputError(f"{what} is {shown(value)}, expected the name of a picture, or its bytes in base64")
    head = value[:64].lower()
    if head.startswith(("http:", "https:", "ftp:", "file:", "s3:", "gs:")):
        raise InputError(f"{what} is {shown(value)}: pictures are read from a folder, and not from elsewhere")
    address = _DATA_URL.match(value)
    if address is not None:
        return PictureSource(None, _decoded(value[address.end() :], what))
    if head.startswith("data:"):
        raise InputError(f"{what} is {clipped(value)}: expected data:image/...;base64,...")
    if len(value) >= _LEAST_BASE64 and _BASE64.fullmatch(value):
        return PictureSource(None, _decoded(value, what))
    return PictureSource(value, None)


def _is_null(value: Any) -> bool:
    """Whether a value is what a table of Hugging Face has where there is no picture."""
    return isinstance(value, Mapping) and {"bytes", "path"} >= value.keys() and not any(value.values())


def _decoded(text: str, what: str) -> bytes:
    if len(text) > MAX_BYTES * 4 // 3 + 1024:
        raise InputError(f"{what} has {len(text):,} characters, more than the {MAX_BYTES >> 20} MB of a picture")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{what} is not base64: {error}") from None
