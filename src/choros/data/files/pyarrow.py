"""Parquet, Arrow and CSV files, read by pyarrow. A block is a row group, a record batch, or about 4 MB of text."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from choros.data.files.reader import Columns, FileReader
from choros.errors import InvalidDataError, counted
from choros.types import Array, ArrayTree

try:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.ipc
    import pyarrow.parquet
except ImportError as error:
    raise InvalidDataError(
        "Parquet, Arrow and CSV files are read by pyarrow, which is missing: pip install pyarrow."
    ) from error

_SourceT = TypeVar("_SourceT")
_ReaderT = TypeVar("_ReaderT")
_PART = 1 << 16  # most rows of one part of a block
_TEXT = 1 << 22  # bytes of a CSV block


class _GapReader(FileReader):
    """Files whose metadata shows which columns have missing values.

    Args:
        files, blocks: as for ``FileReader``.
        gaps: names of the columns that have missing values in any block. Integers of these columns become floats in all
            blocks.
    """

    def __init__(self, files: Sequence[str], blocks: list[list[int]] | None = None, gaps: Sequence[str] = ()) -> None:
        self.gaps = set(gaps)
        super().__init__(files, blocks)

    def spec(self) -> dict[str, Any]:
        """Return the description of ``FileReader.spec`` with the gaps."""
        return {**super().spec(), "gaps": sorted(self.gaps)}


class ParquetTable(_GapReader):
    """Parquet files. A block is a row group: the index of its file, its index in the file, its number of rows."""

    kind, unit = "parquet", ", row group"

    def __init__(self, files: Sequence[str], blocks: list[list[int]] | None = None, gaps: Sequence[str] = ()) -> None:
        self._open = threading.local()
        self._footers: dict[int, Any] = {}  # by file; the time to parse a footer grows with the number of row groups
        super().__init__(files, blocks, gaps)

    def look(self, file: str) -> Iterator[list[int]]:
        """Yield the row groups of a file, from its footer."""
        table_file = _open(pyarrow.parquet.ParquetFile, file)
        self.names.append((file, table_file.schema_arrow.names))
        for i in range(table_file.metadata.num_row_groups):
            row_group = table_file.metadata.row_group(i)
            self.gaps.update(_gaps(row_group))
            yield [i, row_group.num_rows]

    def _file(self, number: int) -> Any:
        """Return the file, opened once for each thread, as a reader is not thread-safe. Threads share the footers."""
        if getattr(self._open, "number", None) != number:
            footer = self._footers.get(number)
            opened = pyarrow.parquet.ParquetFile(self.files[number], metadata=footer, memory_map=True, pre_buffer=False)
            self._footers[number] = opened.metadata
            self._open.number, self._open.file = number, opened
            self._open.names = set(opened.schema_arrow.names)
        return self._open.file

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield the rows of a row group in parts."""
        number, group, _ = self.blocks[block]
        file = self._file(number)
        names = None if wanted is None else [name for name in wanted if name in self._open.names]
        for batch in file.iter_batches(_PART, row_groups=[group], columns=names, use_threads=False):
            yield columns(batch, self.gaps)

    def peek(self) -> Columns:
        """Return the first rows."""
        number, group, _ = self.blocks[0]
        return columns(next(self._file(number).iter_batches(32, row_groups=[group])), self.gaps)


class ArrowTable(_GapReader):
    """Arrow files (IPC, Feather), memory-mapped. A block is a record batch: its file, its index, its number of rows."""

    kind, unit = "arrow", ", record batch"

    def look(self, file: str) -> Iterator[list[int]]:
        """Yield the record batches of a file."""
        reader = _open(pa.ipc.open_file, _open(pa.memory_map, file))
        self.names.append((file, reader.schema.names))
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            self.gaps |= {n for n, c in zip(batch.schema.names, batch.columns, strict=True) if c.null_count}
            yield [i, batch.num_rows]

    def _get(self, block: int) -> Any:
        number, batch, _ = self.blocks[block]
        return pa.ipc.open_file(pa.memory_map(self.files[number])).get_batch(batch)

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield the rows of a record batch in parts."""
        batch = self._get(block)
        if wanted is not None:
            batch = batch.select([name for name in wanted if name in batch.schema.names])
        for top in range(0, batch.num_rows, _PART):
            yield columns(batch.slice(top, _PART), self.gaps)

    def peek(self) -> Columns:
        """Return the first rows."""
        return columns(self._get(0).slice(0, 32), self.gaps)


class CsvTable(FileReader):
    """CSV files with a header line and one row in each line. A block has 4 MB of lines, or is a whole compressed file.

    A quoted field may contain delimiters but no newlines. A block has the index of its file, its first and last byte
    position in the file (end -1: the whole file), and the number of rows.

    Args:
        files, blocks: as for ``FileReader``.
        delimiter: the delimiter of fields. Defaults to ",".
        kinds: names of pyarrow types of columns, by column name. Types of other columns are inferred from the first
            block.
    """

    kind, unit = "csv", " from byte"

    def __init__(
        self,
        files: Sequence[str],
        blocks: list[list[int]] | None = None,
        delimiter: str = ",",
        kinds: dict[str, str] | None = None,
    ) -> None:
        self.delimiter, self.kinds = delimiter, kinds or {}
        super().__init__(files, blocks)
        if blocks is None and self.blocks:
            self.kinds = self._guess(self.kinds)

    def look(self, file: str) -> Iterator[list[int]]:
        """Yield the blocks of a file, and store the names of its header."""
        self.names.append((file, self._header(file)))
        return self._stretches(file)

    def _stretches(self, file: str) -> Iterator[list[int]]:
        """Yield the blocks of whole lines after the header: start and end in bytes, and the number of lines."""
        if file.endswith((".gz", ".bz2", ".zst", ".lz4", ".br")):
            with _open(pa.input_stream, file) as stream:
                yield [0, -1, _lines(stream.read()) - 1]
            return
        with open(file, "rb") as stream:
            begin = len(stream.readline())
            end = os.path.getsize(file)
            while begin < end:
                stream.seek(begin)
                text = stream.read(_TEXT)
                if begin + len(text) < end:
                    text = text[: text.rfind(b"\n") + 1] or text + stream.readline()
                yield [begin, begin + len(text), _lines(text)]
                begin += len(text)

    def _header(self, file: str) -> list[str]:
        with _open(pa.input_stream, file) as stream:
            line = stream.read(_TEXT).split(b"\n", 1)[0]
        options = pyarrow.csv.ParseOptions(delimiter=self.delimiter)
        names: list[str] = pyarrow.csv.read_csv(pa.BufferReader(line + b"\n"), parse_options=options).schema.names
        return names

    def _guess(self, types: dict[str, str]) -> dict[str, str]:
        """Return the types of columns, inferred from the first block. A column without values has the type double."""
        columns_read = {field.name: str(field.type) for field in self._parse(0, types).schema}
        return {name: "double" if kind == "null" else kind for name, kind in columns_read.items()}

    def _parse(self, block: int, kinds: dict[str, str]) -> Any:
        number, begin, end, rows = self.blocks[block]
        path = self.files[number]
        if end < 0:
            source = pa.input_stream(path)
        else:
            with open(path, "rb") as stream:
                names = stream.readline()
                stream.seek(begin)
                source = pa.BufferReader(names + stream.read(end - begin))
        try:
            with source:
                table = pyarrow.csv.read_csv(
                    source,
                    parse_options=pyarrow.csv.ParseOptions(delimiter=self.delimiter),
                    convert_options=pyarrow.csv.ConvertOptions(
                        column_types={name: pa.type_for_alias(kind) for name, kind in kinds.items()}
                    ),
                )
        except pa.ArrowInvalid as error:
            hint = ". Where the first rows look like another type, give types, like types={'a': 'double'}"
            raise InvalidDataError(
                f"{path} cannot be read as CSV: {error}{hint if 'conversion' in str(error) else ''}."
            ) from error
        if table.num_rows != rows:
            raise InvalidDataError(
                f"{path} has {counted(table.num_rows, 'row')} in {counted(rows, 'line')}: a quoted field may not hold "
                "the end of a line."
            )
        return table

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield the rows of a block in parts."""
        yield from map(columns, self._parse(block, self.kinds).to_batches(_PART))

    def peek(self) -> Columns:
        """Return the first rows."""
        return columns(self._parse(0, self.kinds).slice(0, 32))

    def spec(self) -> dict[str, Any]:
        """Return the description of ``FileReader.spec`` with the delimiter and the types of columns."""
        return {**super().spec(), "delimiter": self.delimiter, "kinds": self.kinds}


def columns(batch: ArrayTree, gaps: Container[str] = ()) -> dict[str, Array]:
    """Return the columns of a pyarrow table or batch as numpy arrays.

    Missing numbers become NaN. Integers in columns of ``gaps`` become float64. Lists of equal length become an axis.
    Text and bytes become objects.

    Raises:
        InvalidDataError: two columns have the same name.
    """
    names = batch.schema.names
    if duplicates := [name for i, name in enumerate(names) if name in names[:i]]:
        raise InvalidDataError(f"There are two columns {duplicates[0]!r}: give each a name of its own.")
    columns_read = {name: _column(batch.column(i)) for i, name in enumerate(names)}
    return {n: a.astype(np.float64) if n in gaps and a.dtype.kind in "biu" else a for n, a in columns_read.items()}


def _gaps(group: Any) -> Iterator[str]:
    """Yield the columns of a row group whose statistics show missing values."""
    for i in range(group.num_columns):
        column = group.column(i)
        if column.statistics is not None and column.statistics.null_count:
            yield column.path_in_schema.split(".")[0]


def _column(column: Any) -> Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(column)
    if isinstance(column, pa.ExtensionArray) and hasattr(column, "to_numpy_ndarray"):
        tensors: Array = column.to_numpy_ndarray()
        return tensors
    if pa.types.is_dictionary(kind):
        return _column(column.dictionary_decode())
    if pa.types.is_primitive(kind) and column.null_count and not pa.types.is_floating(kind):
        column = column.cast(pa.float64(), safe=False)
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _lists(column: Any) -> Array:
    """Return lists as an array with one more axis if all have equal length, else as objects."""
    values = _column(column.flatten())
    if len(column) and not column.null_count and values.dtype != object:
        fixed = pa.types.is_fixed_size_list(column.type)
        lengths = np.zeros(1) if fixed else column.value_lengths().to_numpy(zero_copy_only=False)
        if (lengths == lengths[0]).all():
            return values.reshape(len(column), -1, *values.shape[1:])
    rows = np.empty(len(column), object)
    for i, part in enumerate(column):
        rows[i] = np.asarray(part.as_py())
    return rows


def _open(opener: Callable[[_SourceT], _ReaderT], source: _SourceT) -> _ReaderT:
    try:
        return opener(source)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidDataError(f"{source} cannot be read: {error}") from error


def _lines(text: bytes) -> int:
    """Return the number of lines that are rows. Empty lines do not count, as in pyarrow."""
    if text.startswith((b"\n", b"\r\n")) or b"\n\n" in text or b"\n\r\n" in text:
        return sum(bool(line) for line in text.splitlines())
    return text.count(b"\n") + bool(text and not text.endswith(b"\n"))
