"""Tables as random-access records: the rows of a parquet or arrow file.

Rows of a parquet file can only be read in groups, which may be large, and rows of an arrow stream only in order. Both
are copied once, row group by row group, to arrow's file format with the columns that are needed; the copy is mapped
into memory, for direct access to every row. A file in arrow's file format is read as it is.
"""

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, clipped, first_sentence, shown
from moe_jax.data.data_files import cached_copy, import_pyarrow
from moe_jax.data.rows import Example, RowReader
from moe_jax.files.byte_files import open_bytes, size_of
from moe_jax.files.storage_path import as_path

_ROWS = 1024  # rows of a batch in a copy


class TableRows:
    """The rows of a parquet or arrow file, of which the reader makes examples.

    Raises:
      InputError: if it is no such file, or has none of the columns that the reader knows; with `checks`, if a table
        that is copied begins with a bad row.
    """

    def __init__(self, path: Path, form: str, reader: RowReader, *, checks: bool = True):
        self.path = path
        self._reader, self._checks = reader, checks
        self._arrow = import_pyarrow(str(path))
        try:
            file, self._size = self._in_file_format(form)
            self._open(file)
        except (self._arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InputError(f"{path} is not a file of {form}: {first_sentence(error)}") from None

    @property
    def size(self) -> int:
        """Number of bytes of the table that is read."""
        return self._size

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> list[Example]:
        batch = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[batch - 1] if batch else 0)
        values = self._batches.get_batch(batch).slice(row, 1)
        return self._examples({name: values.column(i)[0].as_py() for name, i in self._columns.items()}, index)

    def _examples(self, row: dict[str, Any], index: int) -> list[Example]:
        try:
            examples = self._reader({name: _without_nulls(value) for name, value in row.items()})
            return [example.at(self.where(index), self.path.parent) for example in examples]
        except InputError as error:
            raise BadDocument(f"{self.where(index)}: {error}") from None

    def where(self, index: int) -> str:
        """Returns the path of the file, and the number of a row."""
        return f"{self.path}, row {index + 1}"

    def _open(self, file: Path) -> None:
        source = self._arrow.memory_map(str(file))
        self._batches = self._arrow.ipc.open_file(source)
        self._columns = {
            name: self._batches.schema.get_field_index(name) for name in self._needed(self._batches.schema)
        }
        sizes = (self._batches.get_batch(i).num_rows for i in range(self._batches.num_record_batches))
        self._ends = list(itertools.accumulate(sizes))

    def _needed(self, schema: Any) -> list[str]:
        """Returns the columns that the reader reads; raises `InputError` if there are none."""
        needed = self._reader.columns(schema.names)
        if not needed:
            has = clipped(", ".join(map(shown, schema.names)))
            raise InputError(f"{self.path}: expected columns {self._reader.expected}, got {has}")
        return needed

    def _in_file_format(self, form: str) -> tuple[Path, int]:
        """Returns the file itself, or a copy, and the bytes that it counts for: the same on a disk and in a bucket."""
        arrow = self._arrow
        if form == "parquet":
            copy = self._copy(arrow.parquet.read_schema(self._source()), self._row_groups)
            return copy, copy.stat().st_size
        try:
            with arrow.ipc.open_file(self._source()) as file:
                schema = file.schema
            return as_path(self.path).on_disk or self._copy(schema, self._batches_of_file), size_of(self.path)
        except arrow.ArrowInvalid:
            with arrow.ipc.open_stream(self._source()) as stream:
                schema = stream.schema
            copy = self._copy(schema, self._stream)
            return copy, copy.stat().st_size

    def _source(self) -> Any:
        """Returns the file for arrow: mapped into memory, or, in a bucket, read by ranges."""
        on_disk = as_path(self.path).on_disk
        if on_disk is None:
            return self._arrow.PythonFile(open_bytes(self.path), mode="r")
        return self._arrow.memory_map(str(on_disk))

    def _copy(self, schema: Any, batches: Any) -> Path:
        names = self._needed(schema)

        def write(handle: IO[bytes]) -> None:
            writer = None
            for batch in batches(names):
                if writer is None and batch.num_rows and self._checks:
                    # A column that may not be there is found before all others are copied.
                    self._examples({name: batch.column(name)[0].as_py() for name in names}, 0)
                writer = writer or self._arrow.ipc.new_file(handle, batch.schema)
                writer.write_batch(batch)
            writer = writer or self._arrow.ipc.new_file(handle, self._arrow.schema([schema.field(n) for n in names]))
            writer.close()

        return cached_copy(self.path, f"arrow {' '.join(names)}", write)

    def _row_groups(self, names: list[str]) -> Iterator[Any]:
        with self._arrow.parquet.ParquetFile(self._source(), pre_buffer=True) as file:
            yield from file.iter_batches(batch_size=_ROWS, columns=names)

    def _stream(self, names: list[str]) -> Iterator[Any]:
        with self._arrow.ipc.open_stream(self._source()) as stream:
            for batch in stream:
                yield batch.select(names)

    def _batches_of_file(self, names: list[str]) -> Iterator[Any]:
        with self._arrow.ipc.open_file(self._source()) as file:
            for number in range(file.num_record_batches):
                yield file.get_batch(number).select(names)


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys that arrow adds where an object lacks what others in its column have."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
