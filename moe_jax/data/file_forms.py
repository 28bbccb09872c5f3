"""The form of a data file by its name and by its first bytes: what is no text is not read as text without being asked.

Lists of objects, as many *.json files are, become JSON lines once, in a copy.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO

from moe_jax.core.errors import InputError, shown
from moe_jax.data.data_files import DataFile, cached_copy, read_through
from moe_jax.data.sections import COMPRESSED, form_of_name

_SNIFFED = 64 << 10  # bytes at the beginning of a file that are looked at
_MOST_BYTES = 1 << 30  # of a list, which is read as a whole
_BLANK = b" \t\r\n"

_PACKED = frozenset(".bz2 .xz .lzma .lz4 .zip .7z .tar .tgz .z .br .rar .snappy".split())
_TABLES = frozenset(".csv .tsv .xls .xlsx .orc .avro .sqlite .db .h5 .hdf5 .npy .npz .pkl .pickle .msgpack".split())
_OTHERS = frozenset(
    ".pdf .doc .docx .odt .epub .safetensors .gguf .bin .pt .pth .onnx .png .jpg .jpeg .mp3 .wav".split()
)
_MAGIC = {
    b"PAR1": "a parquet file",
    b"ARROW1": "an arrow file",
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip file",
    b"%PDF": "a PDF file",
}
_JSON = re.compile(rb'\s*(\[\s*)?\{\s*"([^"\\\n]|\\.)*"\s*:')  # an object, or a list of objects


def check_is_text(name: str | PurePath, beginning: bytes, *, of_source: bool = False) -> None:
    """Raises `InputError` if the name of a file, or its beginning, says that it is no text.

    For files that no one has called texts: in the source of a recipe (`of_source`), `format = "text"` does.
    """
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    last = next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED), "")
    beginning = beginning[:_SNIFFED].removeprefix(BOM_UTF8)
    form = form_of_name(name)
    told = f'set format = "{form}" in its source, or "text"' if of_source else "name it *.txt"
    is_told = f"; if it is a text, {told}"
    if last in _PACKED:
        raise InputError(f"{name} is compressed as {last}, known are {', '.join(COMPRESSED)}; decompress it{is_told}")
    if last in _TABLES:
        raise InputError(f"{name} is a table in the form {last}, known are parquet, arrow and JSON{is_told}")
    if last in _OTHERS or form != "text":
        raise InputError(f"{name} is no text by its name ({last}){is_told}")
    what = next((what for magic, what in _MAGIC.items() if beginning.startswith(magic)), None)
    if what is None and b"\x00" in beginning:
        what = "in UTF-16, or no text at all"
    is_told = is_told if of_source else ""
    if what is not None:
        raise InputError(f"{name} is {what} by its first bytes, not UTF-8 text{is_told}")
    if _is_json(beginning):
        raise InputError(f"{name} looks like JSON, not like a text: name it *.jsonl{is_told}")


def _is_json(beginning: bytes) -> bool:
    """Whether a file begins with JSON lines, or with an object or a list of objects over several lines."""
    if not _JSON.match(beginning):
        return False
    lines = [line for line in beginning.split(b"\n") if line.strip()]
    whole = lines[:-1] if len(beginning) == _SNIFFED and len(lines) > 1 else lines
    first = [_parses(line) for line in whole[:2]]
    # A text may begin with a line of JSON; one that is no object is followed by its rest if it is JSON at all.
    return all(first) or not first[0]


def _parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line, parse_int=str), dict | list)
    except (ValueError, RecursionError):
        return False


def check_file_is_text(name: str | PurePath, file: Path | DataFile) -> None:
    """Does what `check_is_text` does for a file of a source, perhaps an uncompressed copy of the one with this name."""
    check_is_text(name, DataFile.of(file).read(0, _SNIFFED), of_source=True)


def as_json_lines(name: Path, file: DataFile) -> DataFile:
    """Returns a file of JSON lines: the file itself, or a copy of one that is a list, one entry on each line.

    Raises:
      InputError: for a list that is not valid JSON, or larger than 1 GiB, for it is read as a whole.
    """
    beginning = file.read(0, _SNIFFED).removeprefix(BOM_UTF8).lstrip(_BLANK)
    if not beginning.startswith(b"["):
        return file
    if file.size > _MOST_BYTES:
        raise InputError(
            f"{name} is a list of {file.size:,} bytes, {_MOST_BYTES:,} are the most; make JSON lines of it"
        )

    def write(handle: IO[bytes]) -> None:
        with read_through(file.path) as stored:
            content = stored.read()
        try:
            text = content.decode("utf-8-sig")
            for begin, end in _entries(text):
                # Line ends are between values only: inside of texts JSON has them as \n.
                handle.write(text[begin:end].replace("\n", " ").replace("\r", " ").encode() + b"\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not UTF-8 text at byte {error.start}") from None
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            problem = error.msg.removesuffix(" at")
            raise InputError(f"{name} is a list that is not valid JSON: {problem} at {where}") from None
        except RecursionError:
            raise InputError(f"{name} is a list that is nested too deeply") from None

    return DataFile(cached_copy(file.path, "list", write))


def _entries(text: str) -> Iterator[tuple[int, int]]:
    """Yields begin and end of every entry of a list; raises `json.JSONDecodeError`."""
    decoder = json.JSONDecoder(parse_int=str, parse_float=str)  # of any length; the values are read later
    blank = json.decoder.WHITESPACE.match  # pyright: ignore[reportAttributeAccessIssue]
    at = blank(text, text.index("[") + 1).end()
    ends = text[at : at + 1] == "]"
    while not ends:
        _, end = decoder.raw_decode(text, at)
        yield at, end
        at = blank(text, end).end()
        ends = text[at : at + 1] == "]"
        if not ends:
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("expected ',' or ']'", text, at)
            at = blank(text, at + 1).end()
    rest = blank(text, at + 1).end()
    if rest < len(text):
        raise json.JSONDecodeError(f"{shown(text[rest : rest + 20])} after the list", text, rest)
